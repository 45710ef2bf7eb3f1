"""The same training under several settings: a grid over settings of `ppo` and `reward`, each with several seeds."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.shaping import check_normalisation

AS_CONFIGURED = "as configured"
LOADED_ONCE = {f"ppo.{name}" for name in (*MODEL_PATHS, "response_length", "overlong_prompts")}
"""Settings by which models are found and prompts are fitted into their context: all trainings share those."""
MEASURES = {"judge_score": "judge score", "win_rate": "win rate", "reward": "reward", "kl": "KL (nats a response)"}


@settings_group("sweep")
class SweepConfig:
    """Which trainings are compared; everything else of a training is as `ppo` and `reward` say."""

    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = field(default_factory=dict)
    """Settings of `ppo` and `reward`, each with the values that it takes, such as `ppo.kl_coef: [0.02, 0.08]` or
    `reward.components.1.weight: [0.1, 1.0]`; all combinations are trained."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = field(default_factory=lambda: [1, 2, 3])
    """Values of `ppo.seed` that each combination is trained with."""


@dataclass(frozen=True)
class Setting:
    """One training: its own name, the name that it shares with the other seeds of its setting, and its groups."""

    name: str
    setting: str
    ppo: PPOConfig
    reward: RewardConfig

    @property
    def params(self) -> dict[str, str]:
        """Every setting of the training, by its full name."""
        groups = {"ppo": asdict(self.ppo), "reward": asdict(self.reward)}
        return {f"{group}.{key}": str(value) for group, values in groups.items() for key, value in values.items()}


def plan_sweep(ppo_config: PPOConfig, reward: RewardConfig, sweep: SweepConfig) -> list[Setting]:
    """Return the trainings of a sweep, the seeds of a setting side by side.

    Raises:
        ConfigError: A key of the grid is no setting, or one that all trainings share; PPO or the reward refuses a
            combination; or two trainings are the same.
    """
    for key in sweep.grid:
        if not key.startswith(("ppo.", "reward.")):
            raise ConfigError(f"sweep.grid: {key} is not a setting of `ppo` or `reward`, such as ppo.kl_coef.")
        if key == "ppo.seed":
            raise ConfigError("sweep.grid: ppo.seed has a setting of its own, sweep.seeds.")
        if key in LOADED_ONCE:
            raise ConfigError(f"sweep.grid: {key} may not vary: all trainings share the models and the prompts.")
    found = []
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
            found.append(Setting(", ".join(names) or AS_CONFIGURED, setting, *both))
    if len({each.name for each in found}) < len(found):
        raise ConfigError("sweep: a value of sweep.grid or sweep.seeds is given twice; each is trained once.")
    if any(each.reward.needs_model for each in found) and not reward.needs_model:
        raise ConfigError(
            "sweep.grid: reward.components has the reward model, which is loaded only if `reward` has it."
        )
    return found


def compare_settings(trainings: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one row a setting: means of MEASURES over its seeds, and their standard deviations, `<measure>_sd`.

    Columns before those: `setting`, `trainings` (that ended), and `failed`, why others did not. One training alone has
    no standard deviation. `trainings` has one row each: `setting`, `error` (empty if it ended), and its measures.
    """
    rows = pd.DataFrame(trainings)
    groups, measures = rows.groupby("setting", sort=False), [name for name in MEASURES if name in rows]
    table = groups[measures].mean().join(groups[measures].std(), rsuffix="_sd")
    table.insert(0, "trainings", groups["kl"].count())
    table.insert(1, "failed", groups["error"].agg(lambda errors: "; ".join(filter(None, errors))))
    return table.reset_index()


def _set(groups: dict[str, Any], key: str, value: Any) -> None:
    """Set what a key such as `reward.components.1.weight` names."""
    *way, last = key.split(".")
    inner: Any = groups
    try:
        for step in way:
            inner = inner[int(step)] if isinstance(inner, list) else inner[step]
        inner[int(last) if isinstance(inner, list) else last] = value
    except (KeyError, IndexError, ValueError, TypeError):
        raise ConfigError(f"sweep.grid: {key} is not a setting of `ppo` or `reward`.") from None
