"""A person's own settings in files (conf/local, or another environment): names that nothing reads, wrong shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kedro.config import OmegaConfigLoader
from kedro.pipeline import Pipeline
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from ppo_rlhf.hooks.configuration_files import ConfigurationFiles, closest, settings_of_groups

REFERENCE = {  # to a name of the same files, or to a global from anywhere
    "parameters": re.compile(r"\$\{\s*(\w+)\s*[}.\[]"),
    "globals": re.compile(r"\$\{(?:globals:)?\s*(\w+)\s*[},.\[]"),
}
OTHER_KIND = {"parameters": "globals", "globals": "parameters"}
REMEDY = {"mapping": "Write `- ` before each entry.", "list": "Write `name: value`, without `- `."}


def unread_settings(loader: OmegaConfigLoader, pipelines: Iterable[Pipeline]) -> list[str]:
    """Return one line for each top-level name in the environment's parameters and globals that nothing reads.

    Read are the names that conf/base has, those that any pipeline takes as `params:name`, and those that some
    configuration file refers to as `${name}` or `${globals:name}`. Kedro ignores all others without a word.
    """
    files = ConfigurationFiles(loader)
    known = {kind: {str(name) for config in files.base(kind) for name in config} for kind in OTHER_KIND}
    given = [
        (kind, path, str(name))
        for kind in OTHER_KIND
        for path, config in files.environment(kind).items()
        for name in config
        if name not in known[kind] and not str(name).startswith("_")
    ]
    if not given:
        return []  # without a look at pipelines, whose stages would be imported
    inputs = {name for pipeline in pipelines for name in pipeline.inputs()}
    if "parameters" in inputs:
        return []  # a node that takes them all may read any
    known["parameters"].update(re.split(r"[:.]", name)[1] for name in inputs if name.startswith("params:"))
    texts = list(files.texts())
    return [
        f"{path}: nothing reads {name} here.{_hint(kind, path, name, known, files)}"
        for kind, path, name in given
        if name not in known[kind] and not any(name in REFERENCE[kind].findall(text) for text in texts)
    ]


def _hint(kind: str, path: Path, name: str, known: dict[str, set[str]], files: ConfigurationFiles) -> str:
    other = OTHER_KIND[kind]
    group, _, setting = name.partition(".")
    if name in known[other]:
        return f" Move it to {path.with_name(other)}.yml."
    if setting and group in known[kind]:
        return f" Write `{group}:`, and below it, indented, `{setting}: …`."
    return closest(name, known[kind], settings_of_groups(files.base("parameters")) if kind == "parameters" else [])


def misshapen_settings(loader: OmegaConfigLoader) -> list[str]:
    """Return one line for each setting that is a list where conf/base has a mapping, or the reverse.

    Kedro merges the two, and fails without saying which.
    """
    try:
        files = ConfigurationFiles(loader)
        base, environment = files.base("parameters"), files.environment("parameters")
    except YAMLError:
        return []  # Kedro says so where it reads the parameters, which not every command does
    shapes = {name: shape for config in base for name, shape in _shapes(config)}
    return [
        f"{path}: {name} is a {shape}, but a {shapes[name]} in conf/base. {REMEDY[shape]}"
        for path, config in environment.items()
        for name, shape in _shapes(config)
        if shapes.get(name, shape) != shape
    ]


def _shapes(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the shape of each mapping, and of each list, that mappings alone lead to."""
    waiting: list[tuple[str, Any]] = [("", OmegaConf.to_container(config, resolve=False))]
    while waiting:
        prefix, values = waiting.pop()
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, dict | list):
                yield f"{prefix}{name}", "mapping" if isinstance(value, dict) else "list"
                waiting.append((f"{prefix}{name}.", value))
