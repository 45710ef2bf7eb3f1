"""Trains the same SFT policy with different KL penalties, to compare the KL and the reward that each beta leads to."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.pipelines.sweep.grid import Setting
from ppo_rlhf.rewards.config import RewardConfig


def _check_distinct(kl_coefs: list[float]) -> list[float]:
    if len(set(kl_coefs)) < len(kl_coefs):
        raise ValueError("a value is repeated; give each value once")
    return sorted(kl_coefs)


@parameter_group("kl_study")
class KLStudyConfig:
    """Which KL penalties the KL study compares. The settings group `ppo` has all other settings of the trainings."""

    kl_coefs: Annotated[list[Annotated[float, Field(ge=0.0)]], Field(min_length=2), AfterValidator(_check_distinct)]
    """Fixed betas in score units per nat. Each beta is one training."""
    kl_target: Annotated[float, Field(gt=0.0)] | None = None
    """Target KL, in nats per response, of one more training with the adaptive controller; None: none. The controller
    starts from `ppo.kl_coef`."""
    kl_horizon: Annotated[float, Field(gt=0.0)] = 500.0
    """That training's `ppo.kl_horizon`. Set the horizon to a fifth of `ppo.total_episodes` or less."""


def plan_study(ppo_config: PPOConfig, reward: RewardConfig, kl_study: KLStudyConfig) -> list[Setting]:
    """Return the KL study's trainings in ascending order of beta, and the training with the adaptive controller last.

    Raises:
        ConfigError: The settings of a training are not allowed.
    """
    trained = {f"beta {x:g}": replace(ppo_config, kl_controller="fixed", kl_coef=x) for x in kl_study.kl_coefs}
    if kl_study.kl_target is not None:
        trained[f"adaptive, target {kl_study.kl_target:g}"] = replace(
            ppo_config, kl_controller="adaptive", kl_target=kl_study.kl_target, kl_horizon=kl_study.kl_horizon
        )
    return [Setting(name, name, config, reward) for name, config in trained.items()]
