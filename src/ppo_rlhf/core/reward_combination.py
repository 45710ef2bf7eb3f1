"""Combines the scores of several rewards of a response into one score."""

from collections.abc import Callable

from torch import Tensor

from ppo_rlhf.core.checks import check_choice, check_shape


def combine_scores(scores: Tensor, how: str) -> Tensor:
    """Combine the scores of several rewards, [K, B] on one scale, into one score per response, [B].

    Args:
        scores: One row of scores per reward, reward units.
        how: A key of `COMBINATIONS`.

    Raises ShapeError if `scores` is not [K, B], and ConfigError if `COMBINATIONS` has no function for `how`.
    """
    check_shape("combine_scores", "KB", scores=scores)
    check_choice("combine_scores", COMBINATIONS, how=how)
    return COMBINATIONS[how](scores)


def disagreement(scores: Tensor) -> Tensor:
    """Return the standard deviation of each response's scores by several rewards: of [K, B], over K, the result [B]."""
    return scores.std(0, correction=0)


COMBINATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda scores: scores.sum(0),
    "mean": lambda scores: scores.mean(0),
    "min": lambda scores: scores.amin(0),
    "mean_minus_std": lambda scores: scores.mean(0) - disagreement(scores),
}
"""The function of each `RewardCombination`. All but the sum are from Coste et al. (2023, arXiv:2310.02743), 3.2: the
mean; the minimum, their worst-case optimisation; and their uncertainty-weighted optimisation, with the standard
deviation (over K, not K − 1) instead of a multiple of the variance, so that the penalty has the scores' unit."""
