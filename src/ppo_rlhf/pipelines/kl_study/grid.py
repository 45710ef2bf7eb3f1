"""The same SFT policy trained under different KL penalties: which KL each beta leads to, and the reward at that KL."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import settings_group
from ppo_rlhf.pipelines.sweep.grid import Setting
from ppo_rlhf.rewards.config import RewardConfig


def _check_distinct(kl_coefs: list[float]) -> list[float]:
    if len(set(kl_coefs)) < len(kl_coefs):
        raise ValueError("a value is given twice; each is trained once")
    return sorted(kl_coefs)


@settings_group("kl_study")
class KLStudyConfig:
    """Which KL penalties are compared; everything else of a training is as `ppo` says."""

    kl_coefs: Annotated[list[Annotated[float, Field(ge=0.0)]], Field(min_length=2), AfterValidator(_check_distinct)]
    """Betas that stay fixed, score units per nat; each is one training."""
    kl_target: Annotated[float, Field(gt=0.0)] | None = None
    """KL in nats a response that one more training aims at, by the adaptive controller from `ppo.kl_coef`. None leaves
    it out."""
    kl_horizon: Annotated[float, Field(gt=0.0)] = 500.0
    """Episodes over which that controller changes beta by 20 % at most; a fifth of `ppo.total_episodes` or less."""


def plan_study(ppo_config: PPOConfig, reward: RewardConfig, kl_study: KLStudyConfig) -> list[Setting]:
    """Return the trainings, by ascending beta, the adaptive one last.

    Raises:
        ConfigError: PPO refuses one of them.
    """
    trained = {f"beta {x:g}": replace(ppo_config, kl_controller="fixed", kl_coef=x) for x in kl_study.kl_coefs}
    if kl_study.kl_target is not None:
        trained[f"adaptive, target {kl_study.kl_target:g}"] = replace(
            ppo_config, kl_controller="adaptive", kl_target=kl_study.kl_target, kl_horizon=kl_study.kl_horizon
        )
    return [Setting(name, name, config, reward) for name, config in trained.items()]
