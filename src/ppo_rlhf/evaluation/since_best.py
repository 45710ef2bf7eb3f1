"""Tests whether scores on the same prompts changed by more than chance since the best earlier evaluation or SFT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.evaluation.policy import PolicyEvaluation
from ppo_rlhf.evaluation.trained_reward import TrainedReward, reward_parts

CHANCE = 0.05
"""Significance level: a change counts as significant if its probability by chance is lower."""
RESAMPLES = 4_999
"""Number of sign patterns that the sign-flip test draws first. With that many patterns, the smallest share that it can
find is 1 in 5000; if it finds that, it draws `FINER` times as many, unless the bound `at_most` is below what these can
find."""
FINER = 40
SCORES = "scores"
"""Key in the log of evaluations for the deciding scores by prompt. Only rows of evaluations that were the best so far
have the key."""
REWARDED = "rewarded"
"""Key in the same rows for what the trained reward of the evaluation's responses is computed from."""
TRAINED_REWARD = "eval/since_best_trained_reward"
PROMPTS = "eval/since_best_prompts"
"""Key of the number of prompts of the evaluations that the best one is chosen from."""


def by_chance(changes_N: NDArray[np.float64]) -> float:
    """Return the probability of a mean at least as large as that of `changes_N` [N] if only noise changed the scores.

    The sign-flip test (Fisher 1935, The Design of Experiments, section 21) uses that noise makes each prompt's change
    as likely as its opposite, whatever the distribution of scores. The result is 1 for a single prompt. Drawn sign
    patterns cannot give a probability below 1 in their number, which is too coarse if the change is tested against many
    evaluations, so the function returns the drawn share or the bound `at_most`, whichever is smaller.
    """
    if len(changes_N) < 2:
        return 1.0
    from scipy.stats import permutation_test

    kind: dict[str, Any] = {"permutation_type": "samples", "alternative": "greater"}
    bound, drawn = at_most(changes_N), 1.0
    for seed, resamples in enumerate((RESAMPLES, FINER * RESAMPLES)):
        how = {"n_resamples": resamples, "batch": 1000, "rng": seed, **kind}
        drawn = float(permutation_test((changes_N,), np.mean, **how).pvalue)
        if drawn > 1.0 / RESAMPLES or bound < 1.0 / (FINER * RESAMPLES):
            break
    return min(drawn, bound)


def at_most(changes_N: NDArray[np.float64]) -> float:
    """Return an upper bound on the share of sign patterns whose mean is as large or larger; 2⁻ⁿ if all n changes are >
    0.

    Chernoff (1952, The Annals of Mathematical Statistics 23, 493-507): with the signs s_i, P(Σ s_i x_i ≥ Σ x_i) is at
    most E exp(t Σ (s_i - 1) x_i), the product of (1 + exp(-2 t x_i)) / 2, for every t ≥ 0. The function minimises over
    t. For a mean of z standard errors the minimum is about z √(2π) times the share.
    """
    if changes_N.sum() <= 0.0:
        return 1.0
    from scipy.optimize import minimize_scalar

    scaled_N = changes_N / np.abs(changes_N).max()

    def logarithm(log_t: float) -> float:
        return float((np.logaddexp(0.0, -2.0 * math.exp(log_t) * scaled_N) - math.log(2.0)).sum())

    best = minimize_scalar(logarithm, bounds=(math.log(1e-3), math.log(1e12)), method="bounded")
    return math.exp(min(0.0, best.fun))


def since_best(
    policy: PolicyEvaluation,
    sft: PolicyEvaluation,
    earlier: Sequence[Mapping[str, Any]],
    trained: TrainedReward | None = None,
) -> dict[str, Any]:
    """Return the metrics `eval/since_best_*` of an evaluation during training, and what to keep if it is the best.

    The best evaluation has the highest mean of the deciding score among SFT's evaluation and the run's `earlier` rows;
    `SCORES` and `REWARDED` of the best ones are kept, so that later evaluations can be compared with them. The
    probability of a fall from the best evaluation is multiplied by the number of evaluations that it was chosen from
    (Bonferroni), and the Bonferroni correction holds for any correlation between evaluations. Before the correction the
    lowest possible probability is 2⁻ⁿ, for a fall on each of n prompts. `trained` gives `TRAINED_REWARD`; without it,
    or if the best evaluation's responses were scored by another reward, there is no such metric.

    Raises:
        CheckpointError: A row of `earlier` has scores of another number of prompts, or a score that is not finite.
    """
    for row in earlier:
        scores = np.asarray(row.get(SCORES, policy.deciding_scores))
        if scores.shape != policy.deciding_scores.shape or not np.isfinite(scores).all():
            raise CheckpointError(
                f"metrics.jsonl: iteration {row['iteration']:.0f} has {scores.size} scores, and this evaluation "
                f"{policy.deciding_scores.size}; both must have one finite score for each of the same prompts. Start a "
                "new run"
            )
    first = {SCORES: sft.deciding_scores, REWARDED: reward_parts(sft), "eval/reward": sft.rewards.mean()}
    best = max((first, *(row for row in earlier if SCORES in row)), key=lambda row: np.mean(row[SCORES]))
    change = policy.deciding_scores - np.asarray(best[SCORES])
    chosen_from, parts = 1 + len(earlier), reward_parts(policy)
    metrics: dict[str, Any] = {
        "eval/since_best_score": float(change.mean()),
        "eval/since_best_reward": float(policy.rewards.mean() - best["eval/reward"]),
        "eval/since_best_p": min(1.0, chosen_from * by_chance(-change)),
        "eval/since_best_p_min": min(1.0, chosen_from * 0.5 ** len(change)),
        PROMPTS: float(len(change)),
    }
    if trained is not None and (rise := trained.rise(parts, best.get(REWARDED, {}))) is not None:
        metrics[TRAINED_REWARD] = rise
    return metrics | ({SCORES: policy.deciding_scores.tolist(), REWARDED: parts} if change.mean() > 0.0 else {})
