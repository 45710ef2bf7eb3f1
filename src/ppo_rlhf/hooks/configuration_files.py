"""Configuration as it stands in its files, before Kedro merges them and run-time parameters, which hides the origin."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kedro.config import MissingConfigException, OmegaConfigLoader
from omegaconf import DictConfig, OmegaConf

Files = dict[Path, DictConfig]


class ConfigurationFiles:
    """The files of conf/base and of the run's environment (conf/local by default), each kind read once.

    Kinds are those of Kedro's loader: parameters, globals, catalog, …
    """

    def __init__(self, loader: OmegaConfigLoader) -> None:
        """Take the loader that knows where the files are."""
        self._loader = loader
        self._project = Path(loader.conf_source).parent
        self._read: dict[str, tuple[Files, Files]] = {}

    def base(self, kind: str) -> list[DictConfig]:
        """Return what each file of conf/base holds."""
        return list(self._both(kind)[0].values())

    def environment(self, kind: str) -> Files:
        """Return what each file of the environment holds, by its path in the project."""
        return self._both(kind)[1]

    def all(self, kind: str) -> list[DictConfig]:
        """Return what each file of both holds."""
        return [*self.base(kind), *self.environment(kind).values()]

    def texts(self) -> Iterator[str]:
        """Yield every file but credentials as text, references to other values as they were written."""
        for kind in self._loader.config_patterns:
            if kind != "credentials":
                yield from (OmegaConf.to_yaml(config, resolve=False) for config in self.all(kind))

    def _both(self, kind: str) -> tuple[Files, Files]:
        if kind not in self._read:
            try:
                base, environment, *_ = self._loader._read_raw_config(kind)
            except MissingConfigException:
                base, environment = {}, {}
            self._read[kind] = self._tidy(base), self._tidy(environment)
        return self._read[kind]

    def _tidy(self, files: dict[Path, Any]) -> Files:
        mappings = {Path(path): config for path, config in files.items() if isinstance(config, DictConfig)}
        return {
            path.relative_to(self._project) if path.is_relative_to(self._project) else path: config
            for path, config in mappings.items()
        }


def settings_of_groups(files: Iterable[DictConfig]) -> list[str]:
    """Return the dotted names of the settings that parameter files have, and of all of PPO's if it is one of them."""
    groups = {str(group): config[group] for config in files for group in config}
    nested = {group: [str(key) for key in values] for group, values in groups.items() if isinstance(values, DictConfig)}
    names = [f"{group}.{key}" for group, keys in nested.items() for key in keys]
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


def _ppo_settings() -> list[str]:
    """Return the names of PPO's settings: those that no file lists have their defaults."""
    from ppo_rlhf.config import PPOConfig  # heavy: only a run that needs a hint pays for it

    return list(PPOConfig.__dataclass_fields__)
