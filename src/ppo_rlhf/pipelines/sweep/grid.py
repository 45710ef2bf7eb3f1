"""Plan and result of a sweep: trainings over a grid of settings of `ppo` and `reward`, each with several seeds."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import Seed, parameter_group
from ppo_rlhf.config.setting_roles import names_of
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.shaping import check_normalisation

AS_CONFIGURED = "as configured"
LOADED_ONCE = {f"ppo.{name}" for name in names_of(PPOConfig, lambda roles: not roles.varies)}
"""Settings that a sweep may not vary, because all its trainings share the loaded models and the prepared prompts."""
MEASURES = {"judge_score": "judge score", "win_rate": "win rate", "reward": "reward", "kl": "KL (nats a response)"}


@parameter_group("sweep")
class SweepConfig:
    """Which trainings a sweep compares. Settings that a sweep does not vary come from the groups `ppo` and `reward`."""

    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = field(default_factory=dict)
    """Settings of `ppo` and `reward` with lists of values, such as `ppo.kl_coef: [0.02, 0.08]`.
    `reward.components.1.weight: [0.1, 1.0]` is another. The sweep trains all combinations of the values."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = field(default_factory=lambda: [1, 2, 3])
    """Values of `ppo.seed`. The sweep trains each combination of `grid` with each seed."""


@dataclass(frozen=True)
class Setting:
    """One training of a sweep. `name` is unique; trainings that differ only in the seed have the same `setting`."""

    name: str
    setting: str
    ppo: PPOConfig
    reward: RewardConfig

    @property
    def params(self) -> dict[str, str]:
        """All settings of the training by their full names."""
        groups = {"ppo": asdict(self.ppo), "reward": asdict(self.reward)}
        return {f"{group}.{key}": str(value) for group, values in groups.items() for key, value in values.items()}


def plan_sweep(ppo_config: PPOConfig, reward: RewardConfig, sweep: SweepConfig) -> list[Setting]:
    """Return the trainings of a sweep. Trainings that differ only in the seed are adjacent in the list.

    Raises:
        ConfigError: A key of the grid is not a setting or may not vary, a combination is not allowed, or two trainings
            are the same.
    """
    for key in sweep.grid:
        if not key.startswith(("ppo.", "reward.")):
            raise ConfigError(f"sweep.grid: {key} is not a setting of `ppo` or `reward`, such as ppo.kl_coef.")
        if key == "ppo.seed":
            raise ConfigError("sweep.grid: ppo.seed may not be in the grid; set sweep.seeds.")
        if key in LOADED_ONCE:
            raise ConfigError(f"sweep.grid: {key} may not vary: all trainings share the models and the prompts.")
    trainings = []
    for values in itertools.product(*sweep.grid.values()):
        chosen = dict(zip(sweep.grid, values, strict=True))
        differing = [f"{key.removeprefix('ppo.')}={value}" for key, value in chosen.items()]
        setting = ", ".join(differing) or AS_CONFIGURED
        for seed in sweep.seeds:
            names = [*differing, *([f"seed={seed}"] if len(sweep.seeds) > 1 else [])]
            groups: dict[str, Any] = {"ppo": {**asdict(ppo_config), "seed": seed}, "reward": asdict(reward)}
            for key, value in chosen.items():
                _set(groups, key, value)
            try:
                both = PPOConfig(**groups["ppo"]), RewardConfig(**groups["reward"])
                check_normalisation(both[1].normalise, both[0])
            except ConfigError as error:
                raise ConfigError("\n".join(f"sweep.grid: {line}" for line in str(error).splitlines())) from None
            trainings.append(Setting(", ".join(names) or AS_CONFIGURED, setting, *both))
    if len({each.name for each in trainings}) < len(trainings):
        raise ConfigError("sweep: a value of sweep.grid or sweep.seeds is repeated; give each value once.")
    if any(each.reward.needs_catalogued_model for each in trainings) and not reward.needs_catalogued_model:
        raise ConfigError(
            "sweep.grid: reward.components adds the reward model, which is loaded only if `reward` has it, too."
        )
    return trainings


def compare_settings(trainings: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one row for each setting: means of MEASURES over seeds, and standard deviations `<measure>_sd`.

    The table begins with the columns `setting`, `trainings` (the number of finished trainings) and `failed` (the errors
    of trainings that failed). A setting with a single training has no standard deviation. The argument `trainings` has
    one row for each training: `setting`, `error` (empty if the training finished), and its measures.
    """
    rows = pd.DataFrame(trainings)
    groups, measures = rows.groupby("setting", sort=False), [name for name in MEASURES if name in rows]
    table = groups[measures].mean().join(groups[measures].std(), rsuffix="_sd")
    table.insert(0, "trainings", groups["kl"].count())
    table.insert(1, "failed", groups["error"].agg(lambda errors: "; ".join(filter(None, errors))))
    return table.reset_index()


def _set(groups: dict[str, Any], key: str, value: Any) -> None:
    """Set the setting that a key such as `reward.components.1.weight` names."""
    *way, last = key.split(".")
    inner: Any = groups
    try:
        for step in way:
            inner = inner[int(step)] if isinstance(inner, list) else inner[step]
        inner[int(last) if isinstance(inner, list) else last] = value
    except (KeyError, IndexError, ValueError, TypeError):
        raise ConfigError(f"sweep.grid: {key} is not a setting of `ppo` or `reward`.") from None
