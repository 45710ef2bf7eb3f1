"""A person's own settings in files (conf/local, or another environment): names that nothing reads, wrong shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kedro.config import OmegaConfigLoader
from kedro.pipeline import Pipeline
from omegaconf import DictConfig, OmegaConf

from ppo_rlhf.hooks.configuration_files import base_files, closest, environment_files, settings_of_groups, texts

REFERENCE = re.compile(r"\$\{(?:globals:|runtime_params:)?\s*(\w+)")
OTHER_KIND = {"parameters": "globals", "globals": "parameters"}
REMEDY = {"mapping": "Write `- ` before each entry.", "list": "Write `name: value`, without `- `."}


def unread_settings(loader: OmegaConfigLoader, pipelines: Iterable[Pipeline]) -> list[str]:
    """Return one line for each top-level name in the environment's parameters and globals that nothing reads.

    Read are the names that conf/base has, those that any pipeline takes as `params:name`, and those that some
    configuration file refers to as `${name}` or `${globals:name}`. Kedro ignores all others without a word.
    """
    inputs = {name for pipeline in pipelines for name in pipeline.inputs()}
    if "parameters" in inputs:
        return []  # a node that takes them all may read any
    groups = base_files(loader, "parameters")
    known = {kind: {str(name) for config in base_files(loader, kind) for name in config} for kind in OTHER_KIND}
    known["parameters"].update(re.split(r"[:.]", name)[1] for name in inputs if name.startswith("params:"))
    referred_to = {name for text in texts(loader) for name in REFERENCE.findall(text)}
    problems = []
    for kind, other in OTHER_KIND.items():
        nested = settings_of_groups(groups) if kind == "parameters" else []
        for path, config in environment_files(loader, kind).items():
            for name in map(str, config):
                if name in known[kind] | referred_to or name.startswith("_"):
                    continue
                group, _, setting = name.partition(".")
                if name in known[other]:
                    hint = f" Move it to {path.with_name(other)}.yml."
                elif setting and group in known[kind]:
                    hint = f" Write `{group}:`, and below it, indented, `{setting}: …`."
                else:
                    hint = closest(name, known[kind], nested)
                problems.append(f"{path}: nothing reads {name} here.{hint}")
    return problems


def misshapen_settings(loader: OmegaConfigLoader) -> list[str]:
    """Return one line for each setting that is a list where conf/base has a mapping, or the reverse.

    Kedro merges the two, and fails without saying which.
    """
    shapes = {name: shape for config in base_files(loader, "parameters") for name, shape in _shapes(config)}
    return [
        f"{path}: {name} is a {shape}, but a {shapes[name]} in conf/base. {REMEDY[shape]}"
        for path, config in environment_files(loader, "parameters").items()
        for name, shape in _shapes(config)
        if shapes.get(name, shape) != shape
    ]


def _shapes(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the shape of each mapping, and of each list, that mappings alone lead to."""
    waiting = [("", OmegaConf.to_container(config, resolve=False))]
    while waiting:
        prefix, values = waiting.pop()
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, dict | list):
                yield f"{prefix}{name}", "mapping" if isinstance(value, dict) else "list"
                waiting.append((f"{prefix}{name}.", value))
