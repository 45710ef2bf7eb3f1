"""Configuration as it stands in its files, before Kedro merges them and run-time parameters, which hides the origin."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kedro.config import MissingConfigException, OmegaConfigLoader
from omegaconf import DictConfig, OmegaConf


def base_files(loader: OmegaConfigLoader, kind: str) -> list[DictConfig]:
    """Return what each file of conf/base holds; kinds are the loader's: parameters, globals, catalog, …"""
    return [config for config in _read(loader, kind)[0].values() if isinstance(config, DictConfig)]


def environment_files(loader: OmegaConfigLoader, kind: str) -> dict[Path, DictConfig]:
    """Return what each file of the run's environment (conf/local by default) holds, by its path in the project."""
    project = Path(loader.conf_source).parent
    files = {Path(path): config for path, config in _read(loader, kind)[1].items() if isinstance(config, DictConfig)}
    return {
        path.relative_to(project) if path.is_relative_to(project) else path: config for path, config in files.items()
    }


def all_files(loader: OmegaConfigLoader, kind: str) -> list[DictConfig]:
    """Return what each file of conf/base and of the environment holds."""
    return [*base_files(loader, kind), *environment_files(loader, kind).values()]


def texts(loader: OmegaConfigLoader) -> Iterator[str]:
    """Yield every file but credentials as text, references to other values as they were written."""
    for kind in loader.config_patterns:
        if kind != "credentials":
            yield from (OmegaConf.to_yaml(config, resolve=False) for config in all_files(loader, kind))


def settings_of_groups(files: Iterable[DictConfig]) -> list[str]:
    """Return the dotted names of the settings that parameter files have, and of all of PPO's if it is one of them."""
    groups = {str(group): config[group] for config in files for group in config}
    names = [f"{group}.{key}" for group, values in groups.items() if isinstance(values, DictConfig) for key in values]
    return names + [f"ppo.{name}" for name in _ppo_settings() if "ppo" in groups]


def closest(name: str, known: Iterable[str], nested: Iterable[str]) -> str:
    """Return a hint, with a space before it: the nearest name known, or the nearest setting of a group, or them all."""
    for candidate in nested:
        if candidate.partition(".")[2] == name:
            return f" Did you mean `{candidate}`?"
    near: Any = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    if not near:
        bare = {candidate.partition(".")[2]: candidate for candidate in nested}
        near = [bare[match] for match in difflib.get_close_matches(name, list(bare), n=1, cutoff=0.6)]
    return f" Did you mean `{near[0]}`?" if near else f" Known are {', '.join(sorted(known))}."


def _read(loader: OmegaConfigLoader, kind: str) -> tuple[dict[Path, DictConfig], dict[Path, DictConfig]]:
    try:
        base, environment, *_ = loader._read_raw_config(kind)
    except MissingConfigException:
        return {}, {}
    return base, environment


def _ppo_settings() -> list[str]:
    """Return the names of PPO's settings: those that no file lists have their defaults."""
    from ppo_rlhf.training.config import PPOConfig  # heavy: only a run with --params pays for it

    return list(PPOConfig.__dataclass_fields__)
