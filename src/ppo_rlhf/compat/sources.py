"""Reads files with settings of other libraries, one mapping each, and converts them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.llamafactory import from_llamafactory
from ppo_rlhf.compat.swift import from_swift
from ppo_rlhf.compat.trl import from_trl
from ppo_rlhf.compat.verl import from_verl
from ppo_rlhf.core.errors import ConfigError, in_one_line

WHAT_TO_GIVE = {
    "trl": "the fields of its PPOConfig",
    "llamafactory": "the file that `llamafactory-cli train` takes",
    "ms-swift": "args.json, which each run of `swift rlhf` writes to its output directory, or the arguments by name",
    "verl": "a run's .hydra/config.yaml, or what the training command prints: `python -m verl.trainer.main_ppo … --cfg "
    "job --resolve > ppo.yaml`",
}
"""For each library, the mapping that it is converted from."""
_PLACES = ("sft_model_path", "reward_model_path", "base_model_path", "prompts_path", "evaluation_prompts_path")


def convert_files(library: str, files: Sequence[Path], *, num_prompts: int | None = None) -> list[Conversion]:
    """Return the conversion of each file of settings. Of several stages (LLaMA-Factory), PPO's conversion comes first.

    Relative paths of models and prompts become absolute if they are there, seen from the working directory or from a
    folder above the file.

    Raises:
        ConfigError: A file is no mapping, its stage is not supported, or there are too many files.
    """
    if len(files) > 1 and library != "llamafactory":
        raise ConfigError(f"{library} has all settings in one file, but {len(files)} files are given. Give one file.")
    read = [mapping_of(file, WHAT_TO_GIVE[library]) for file in files]
    if library == "llamafactory":
        stages = [str(settings.get("stage", "sft")) for settings in read]
        if twice := next((stage for stage in stages if stages.count(stage) > 1), None):
            raise ConfigError(f"Two of the files have stage={twice}. Give one file of each stage.")
        found = [from_llamafactory(settings, num_prompts=num_prompts, beside=stages) for settings in read]
    else:
        convert = {"trl": from_trl, "ms-swift": from_swift, "verl": from_verl}[library]
        found = [convert(read[0], num_prompts=num_prompts)]
    for conversion, file in zip(found, files, strict=True):
        _locate(conversion, [Path.cwd(), *file.resolve().parents])
    return sorted(found, key=lambda conversion: "ppo" not in conversion.parameters)


def mapping_of(file: Path, what: str) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. `what` says for errors which mapping to give.

    Raises:
        ConfigError: The file cannot be read, is no mapping, or has a key twice or a YAML alias.
    """
    fix = f"Give settings as YAML or JSON (.yaml, .yml, .json): {what}"
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{file} is not read: scripts and other files are no mapping of settings. {fix}.")
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            values = json.loads(text, object_pairs_hook=_once)
        else:
            values = _Loader(text).get_single_data()
    except (OSError, ValueError, yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{file} cannot be read: {in_one_line(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{file} cannot be read: too many brackets within brackets.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no settings; it must be a mapping (name: value). {fix}.")
    return {str(name): value for name, value in values.items()}


def _locate(c: Conversion, folders: Iterable[Path]) -> None:
    for name in _PLACES:
        if place := c.globals.get(name):
            path = next((folder / place for folder in folders if os.path.exists(folder / place)), None)
            c.write(name, str(path.resolve()) if path else place, c.origins[name])


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a mapping; raise ConfigError if a key stands twice."""
    names = [str(name) for name, _ in pairs]
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise ConfigError(f"{twice} is given twice, keep one of the two")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice, and aliases, which can grow without limit. Reads 1e-5 as a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = cast(yaml.AliasEvent, self.peek_event())
            raise ConfigError(f"line {event.start_mark.line + 1}: write the value instead of the alias *{event.anchor}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _once([(str(key.value), None) for key, _ in node.value])  # a key may be a list of nodes
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+"), list("-+.0123456789")
)
