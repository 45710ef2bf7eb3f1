"""Names given with --params: Kedro ignores one that nothing reads, which hides every misspelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kedro.config import MissingConfigException, OmegaConfigLoader
from omegaconf import DictConfig, OmegaConf

READ_BY_NAME = re.compile(r"\$\{runtime_params:\s*([\w.]+)")


def unknown_names(loader: OmegaConfigLoader) -> list[str]:
    """Return one line for each top-level name of the run's parameters that nothing reads.

    Known are the parameter groups, the globals, and every name that some configuration file reads as
    `${runtime_params:name, …}`.
    """
    given = list(loader.runtime_params or {})
    if not given:
        return []
    files = {kind: list(_files(loader, kind)) for kind in loader.config_patterns if kind != "credentials"}
    groups = {str(group): config[group] for config in files["parameters"] for group in config}
    known = {*groups, *(str(name) for config in files.get("globals", []) for name in config)}
    for config in (config for configs in files.values() for config in configs):
        known.update(name.split(".")[0] for name in READ_BY_NAME.findall(OmegaConf.to_yaml(config, resolve=False)))
    known = {name for name in known if not name.startswith("_")}
    nested = [f"{group}.{key}" for group, values in groups.items() if isinstance(values, DictConfig) for key in values]
    nested += [f"ppo.{name}" for name in _ppo_settings() if "ppo" in groups]
    return [
        f"--params {name}: nothing is called so.{_closest(name, known, nested)}" for name in given if name not in known
    ]


def _files(loader: OmegaConfigLoader, kind: str) -> Iterator[DictConfig]:
    """Yield what each file of that kind holds, before run-time parameters are merged in (which hides their origin)."""
    try:
        base, env, *_ = loader._read_raw_config(kind)
    except MissingConfigException:
        return
    yield from (config for config in (*base.values(), *env.values()) if isinstance(config, DictConfig))


def _closest(name: str, known: Iterable[str], nested: Iterable[str]) -> str:
    for candidate in nested:
        if candidate.partition(".")[2] == name:
            return f" Did you mean `{candidate}`?"
    near: Any = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    if not near:
        bare = {candidate.partition(".")[2]: candidate for candidate in nested}
        near = [bare[match] for match in difflib.get_close_matches(name, list(bare), n=1, cutoff=0.6)]
    return f" Did you mean `{near[0]}`?" if near else f" Known are {', '.join(sorted(known))}."


def _ppo_settings() -> list[str]:
    """Return the names of PPO's settings: those that no file lists have their defaults."""
    from ppo_rlhf.training.config import PPOConfig  # heavy: only a run with --params pays for it

    return list(PPOConfig.__dataclass_fields__)
