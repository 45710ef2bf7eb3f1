"""Reads files of settings, with limits: what could be misread or grow without limit is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml

from ppo_rlhf.compat.command_line import LONGEST
from ppo_rlhf.core.errors import ConfigError, in_one_line


class _Loader(yaml.SafeLoader):
    """Refuses what could be misread: aliases, which can grow without limit, and keys that are given twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = cast(yaml.AliasEvent, self.peek_event())
            raise ConfigError(f"line {event.start_mark.line + 1}: write the value instead of the alias *{event.anchor}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise ConfigError(f"line {key.start_mark.line + 1}: {key.value} is given twice. Keep one of the two")
            names.add(str(key.value))
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


def parsed(text: str, where: str) -> Any:
    """Return the value of a YAML or JSON text.

    Raises:
        ConfigError: The text is too long, or it cannot be read.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"{where} has {len(text)} characters, settings have at most {LONGEST}.")
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, ConfigError) as error:
        raise ConfigError(f"{where} cannot be read: {in_one_line(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{where} cannot be read: too many brackets within brackets.") from None


def mapping_of(file: Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file."""
    values = parsed(text_of(file).replace("\t", " "), str(file))  # a YAML parser reads JSON too, except for tabs
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no settings; it must be a mapping (name: value).")
    return {str(name): value for name, value in values.items()}


def text_of(file: Path) -> str:
    """Return the text of a file; raise ConfigError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {in_one_line(error)}.") from None
