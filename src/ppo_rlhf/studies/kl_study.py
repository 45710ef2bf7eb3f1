"""The same SFT policy trained under different KL penalties: which KL each beta leads to, and the reward at that KL."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import pandas as pd
from pydantic import AfterValidator, Field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import settings_group
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.studies.sweep import Setting

TOLERANCE = 0.25
"""The adaptive controller reached its target if the KL at the end is at most this share of it away."""


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


def settings_of(study: KLStudyConfig, ppo: PPOConfig, reward: RewardConfig) -> list[Setting]:
    """Return the trainings, by ascending beta, the adaptive one last.

    Raises:
        ConfigError: PPO refuses one of them.
    """
    trained = {f"beta {beta:g}": replace(ppo, kl_controller="fixed", kl_coef=beta) for beta in study.kl_coefs}
    if study.kl_target is not None:
        adaptive = replace(ppo, kl_controller="adaptive", kl_target=study.kl_target, kl_horizon=study.kl_horizon)
        trained[f"adaptive, target {study.kl_target:g}"] = adaptive
    return [Setting(name, name, config, reward) for name, config in trained.items()]


def findings(results: pd.DataFrame, best_of_n: pd.DataFrame) -> tuple[dict[str, float], list[str]]:
    """Return what the study found, as metrics and in words.

    Args:
        results: One row a training: `setting`, `kl_controller`, `kl_coef` (its first beta), `kl_target`, `kl` (nats a
            response), `reward` and `reward_sft`, and `judge_score` and `judge_score_sft` if there is a judge.
        best_of_n: From `evaluation.best_of_n.best_of_n_curve`.
    """
    fixed, adaptive = (results[results["kl_controller"] == kind] for kind in ("fixed", "adaptive"))
    lines: list[str] = []
    metrics: dict[str, float] = {}
    if len(fixed) > 1:  # else trainings failed
        is_ordered = fixed.sort_values("kl_coef")["kl"].is_monotonic_decreasing
        each = ", ".join(f"{row.kl:.2f} at beta {row.kl_coef:g}" for row in fixed.itertuples())
        falls = "falls" if is_ordered else "does NOT fall"
        lines.append(f"KL from SFT, nats a response: {each}. It {falls} as beta rises.")
        metrics["kl_study/is_ordered_by_beta"] = float(is_ordered)
    for row in adaptive.itertuples():
        ratio = float(row.kl / row.kl_target)
        metrics["kl_study/adaptive_kl_over_target"] = ratio
        verdict = "within" if abs(ratio - 1) <= TOLERANCE else "NOT within"
        lines.append(
            f"The adaptive controller ended at {row.kl:.2f} nats, {verdict} {TOLERANCE:.0%} of its target of "
            f"{row.kl_target:g}; its beta went from {row.kl_coef:g} to {row.last_kl_coef:.3g}."
        )
    deciding, what = ("judge_score", "judge score") if "judge_score" in results else ("reward", "reward")
    best = results.loc[results[deciding].idxmax()]
    metrics[f"kl_study/best_{deciding}"] = float(best[deciding])
    lines.append(
        f"The highest {what} of PPO is {best[deciding]:.2f}, by {best['setting']}, at {best['kl']:.2f} nats; SFT has "
        f"{best[f'{deciding}_sft']:.2f}."
    )
    n, kl, baseline = best_of_n.loc[best_of_n[deciding].idxmax(), ["n", "kl", deciding]]
    metrics[f"kl_study/best_of_n_{deciding}"] = float(baseline)
    lines.append(f"Best-of-{n:.0f} by the reward has {baseline:.2f}, at {kl:.2f} nats at most.")
    return metrics, lines
