"""A run of which no rule has anything to say, and ways to spoil it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppo_rlhf.config import PPOConfig

ITERATIONS = 40
DEMO: dict[str, Any] = {
    "total_episodes": 2560,
    "per_device_train_batch_size": 64,
    "response_length": 36,
    "temperature": 1.0,
    "learning_rate": 4e-4,
    "value_learning_rate": 5e-4,
    "kl_coef": 0.08,
}
ADAPTIVE: dict[str, Any] = {"kl_controller": "adaptive", "kl_horizon": 200.0, "kl_coef": 0.05}
HEALTHY: dict[str, Any] = {  # (value of the first iteration, of the last), a straight line between them
    "objective/kl": (0.0, 4.0),
    "objective/kl_coef": (0.08, 0.08),
    "objective/entropy": (1.6, 1.2),
    "objective/scores": (0.0, 1.6),
    "objective/scores_std": (1.0, 0.6),
    "objective/scores_p05": (-1.8, 0.1),
    "objective/scores_p50": (0.0, 1.9),
    "objective/scores_p95": (1.8, 2.2),
    "policy/approxkl_avg": (0.003, 0.0003),
    "policy/clipfrac_avg": (0.02, 0.002),
    "policy/grad_norm": (0.3, 0.3),
    "policy/rollout_logprob_gap": (4e-7, 4e-7),
    "loss/value_avg": (0.7, 0.05),
    "val/clipfrac_avg": (0.3, 0.0),
    "val/explained_variance": (-0.6, 0.8),
    "response/length": (17.0, 13.0),
    "response/truncated_fraction": (0.02, 0.0),
    "optimiser/skipped_steps": (0.0, 0.0),
    "optimiser/steps": (4.0, 4.0 * ITERATIONS),
}
EVALUATED: dict[str, Any] = {  # at iterations 10, 20, 30, 40
    "eval/judge_score": [0.1, 0.4, 0.5, 0.6],
    "eval/judge_score_sft": [0.0] * 4,
    "eval/reward": [0.4, 1.0, 1.4, 1.6],
    "eval/reward_sft": [0.0] * 4,
    "eval/kl": [1.0, 2.0, 3.0, 4.0],
    "eval/verdict": [0.0] * 4,  # no success for certain, which would refute rules
    "eval/since_best_score": [0.1, 0.3, 0.1, 0.1],
    "eval/since_best_trained_reward": [0.4, 0.6, 0.4, 0.2],
    "eval/since_best_p": [1.0] * 4,
    "eval/since_best_exploits": [0.0] * 4,
    "eval/distinct_2": [0.23, 0.21, 0.2, 0.19],
    "eval/distinct_2_sft": [0.23] * 4,
}
Spoilt = dict[str, Any]


def config(**changed: Any) -> PPOConfig:
    return PPOConfig(**(DEMO | changed))


def curve(*levels: float) -> list[float]:
    """Forty iterations in equal parts at each level."""
    return list(np.repeat(levels, ITERATIONS // len(levels)))


def history(spoilt: Spoilt | None = None, iterations: int = ITERATIONS) -> list[dict[str, float]]:
    """A healthy run's rows with other curves in some places: a pair is a line, a list the values themselves."""
    curves = HEALTHY | EVALUATED | (spoilt or {})
    table = {key: _values(key, value) for key, value in curves.items()}
    rows = [{"iteration": float(i + 1)} | {key: values[i] for key, values in table.items()} for i in range(ITERATIONS)]
    return rows[:iterations]


def _values(key: str, given: Any) -> list[float]:
    if isinstance(given, tuple):
        return list(np.linspace(*given, ITERATIONS))
    if key.startswith("eval/"):
        values = [float("nan")] * ITERATIONS
        values[9::10] = given
        return values
    return given
