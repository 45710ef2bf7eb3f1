"""Whether scores on the same prompts changed by more than chance: since an evaluation's best, or SFT's, predecessor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, PolicyEvaluation

CHANCE = 0.05
"""A change that chance makes less often than this is certain."""
RESAMPLES = 4_999
"""Patterns of signs that are drawn, if there are more: their share is 1 in 5000 at least."""
SCORES = "scores"
"""Key in the log of evaluations: each prompt's deciding score, of a row that was the best when it was made."""


def by_chance(changes_N: NDArray[np.float64]) -> float:
    """Return the probability of a mean change this large or larger if nothing but noise changed.

    The sign-flip test (Fisher 1935, The Design of Experiments, section 21): noise makes each prompt's change as likely
    as its opposite, whatever the scores' distribution. A single prompt tells nothing: 1. A share of drawn patterns is
    1 in 5000 at least, too much for a fall that is held against many evaluations: there the bound on it counts.
    """
    if len(changes_N) < 2:
        return 1.0
    from scipy.stats import permutation_test  # takes a second, which every start would pay

    kind: dict[str, Any] = {"permutation_type": "samples", "alternative": "greater"}
    drawn = permutation_test((changes_N,), np.mean, n_resamples=RESAMPLES, batch=1000, rng=0, **kind).pvalue
    return min(float(drawn), at_most(changes_N))


def at_most(changes_N: NDArray[np.float64]) -> float:
    """Return a bound on the share of all patterns of signs with a mean as large or larger; 2⁻ⁿ if all n changes rose.

    Chernoff (1952, The Annals of Mathematical Statistics 23, 493-507): with the signs s_i, P(Σ s_i x_i ≥ Σ x_i) is at
    most E exp(t Σ (s_i - 1) x_i), the product of (1 + exp(-2 t x_i)) / 2, for every t ≥ 0. The least of them is about
    z √(2π) times the share, for a mean of z standard errors.
    """
    if changes_N.sum() <= 0.0:
        return 1.0
    from scipy.optimize import minimize_scalar

    scaled_N = changes_N / np.abs(changes_N).max()

    def logarithm(log_t: float) -> float:
        return float((np.logaddexp(0.0, -2.0 * math.exp(log_t) * scaled_N) - math.log(2.0)).sum())

    best = minimize_scalar(logarithm, bounds=(math.log(1e-3), math.log(1e12)), method="bounded")
    return math.exp(min(0.0, best.fun))


def exploits_reward(policy: PolicyEvaluation, sft: PolicyEvaluation) -> bool:
    """Return whether the reward rose from SFT's and the judge's score fell, both for certain (tested on two sides)."""
    if JUDGE_COLUMN not in policy.judges:
        return False
    changes = (policy.rewards - sft.rewards, sft.deciding_scores - policy.deciding_scores)
    return all(by_chance(policy.by_prompt(change).mean(axis=1)) < CHANCE / 2.0 for change in changes)


def exploits_since_best(history: pd.DataFrame) -> bool:
    """Return whether, by a run's last evaluation, the deciding score fell since its best and the reward did not.

    It asks for half of `CHANCE`, as `exploits_reward` does: the report's sentence goes by either.
    """
    last = history.reindex(columns=["eval/since_best_p", "eval/since_best_reward"]).dropna().tail(1)
    return any(p < CHANCE / 2.0 and reward >= 0.0 for p, reward in last.to_numpy())


def least_since_best_p(history: pd.DataFrame) -> float:
    """Return the least `eval/since_best_p` that a run's last evaluation could have had; 0 without evaluations."""
    least = history.get("eval/since_best_p_min", pd.Series(dtype=float)).dropna()
    return float(least.iloc[-1]) if len(least) else 0.0


def since_best(
    policy: PolicyEvaluation, sft: PolicyEvaluation, earlier: Sequence[Mapping[str, Any]]
) -> dict[str, float | list[float]]:
    """Return the metrics `eval/since_best_*` of an evaluation while training; with `SCORES` if it is the best so far.

    The best of SFT's evaluation and the run's `earlier` rows has the highest mean of the score that decides the win
    rate. The probability of a fall from it is multiplied by the number of evaluations that it was chosen from
    (Bonferroni), however they are correlated. A fall on each of n prompts has 2⁻ⁿ before that: no fall has less.
    """
    first = {SCORES: sft.deciding_scores, "eval/reward": sft.rewards.mean()}
    best = max((first, *(row for row in earlier if SCORES in row)), key=lambda row: np.mean(row[SCORES]))
    change = policy.deciding_scores - np.asarray(best[SCORES])
    chosen_from = 1 + len(earlier)
    metrics = {
        "eval/since_best_score": float(change.mean()),
        "eval/since_best_reward": float(policy.rewards.mean() - best["eval/reward"]),
        "eval/since_best_p": min(1.0, chosen_from * by_chance(-change)),
        "eval/since_best_p_min": min(1.0, chosen_from * 0.5 ** len(change)),
    }
    return metrics | ({SCORES: policy.deciding_scores.tolist()} if change.mean() > 0.0 else {})
