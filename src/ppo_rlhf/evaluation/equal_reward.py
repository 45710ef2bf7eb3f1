"""Compares the judge's scores of two policies' responses that have the same reward: what the reward does not see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, PolicyEvaluation
from ppo_rlhf.evaluation.since_best import RESAMPLES
from ppo_rlhf.evaluation.verdict import MIN_PROMPTS

CERTAIN = 0.01
"""Significance level of a fall of the judge's score at equal reward."""


class _Cells(NamedTuple):
    """A policy's responses of one reward, by prompt; prompts without such a response are left out."""

    counts: NDArray[np.float64]  # responses of each prompt
    sums: NDArray[np.float64]  # their judge's scores, summed


def compare_at_equal_reward(policy: PolicyEvaluation, sft: PolicyEvaluation) -> dict[str, float]:
    """Return `eval/judge_gap`: the judge's score of the policy's responses less that of SFT's of the same reward.

    A policy that exploits its reward finds responses that the reward pays for and the judge does not. Then the judge
    scores the policy's responses lower than SFT's responses of the same reward, even if the judge's mean score rose. A
    judge that is only noisier than the reward shows no gap, because noise does not tell the two policies apart.

    `eval/judge_gap` is the mean over the policy's responses whose reward SFT also got, each with at least `MIN_PROMPTS`
    prompts of either policy. `eval/judge_gap_p` is the probability of a gap as low if at equal reward the judge did not
    tell the policies apart: then the responses to a prompt could as well be the other policy's (a permutation test of
    the prompts' responses, separately for each reward). `eval/judge_gap_prompts` is the number of the policy's prompts
    with such a response. The result is empty without a judge, if the judge is the reward, and if no reward has so many
    prompts: rewards of many values, as a reward model's, are hardly ever equal.
    """
    sides = [
        (each.by_prompt(each.rewards), each.by_prompt(each.judges.get(JUDGE_COLUMN, each.rewards)))
        for each in (policy, sft)
    ]
    if all(np.array_equal(rewards, scores) for rewards, scores in sides):
        return {}
    rewards = sorted({*sides[0][0].flat} & {*sides[1][0].flat})
    cells = {reward: tuple(_cells(*side, reward) for side in sides) for reward in rewards}
    pairs = {reward: pair for reward, pair in cells.items() if min(len(each.counts) for each in pair) >= MIN_PROMPTS}
    if not pairs:
        return {}
    compared = sum(ours.counts.sum() for ours, _ in pairs.values())
    generator = np.random.default_rng(0)
    gap, by_chance_R = 0.0, np.zeros(RESAMPLES)
    for ours, theirs in pairs.values():
        weight = ours.counts.sum() / compared
        both = _Cells(*(np.concatenate(values) for values in zip(ours, theirs, strict=True)))
        gap += weight * float(_difference(both, np.arange(len(ours.counts))[None])[0])
        drawn = generator.random((RESAMPLES, len(both.counts))).argsort(1)[:, : len(ours.counts)]
        by_chance_R += weight * _difference(both, drawn)
    return {
        "eval/judge_gap": gap,
        "eval/judge_gap_p": float((1 + (by_chance_R <= gap + 1e-12).sum()) / (1 + RESAMPLES)),
        "eval/judge_gap_prompts": int(np.isin(sides[0][0], list(pairs)).any(1).sum()),
    }


def _cells(rewards_Nn: NDArray[np.float64], scores_Nn: NDArray[np.float64], reward: float) -> _Cells:
    """Return the cells of N prompts with n responses each."""
    is_equal_Nn = rewards_Nn == reward
    counts_N = is_equal_Nn.sum(1).astype(np.float64)
    sums_N = np.where(is_equal_Nn, scores_Nn, 0.0).sum(1)
    return _Cells(counts_N[counts_N > 0], sums_N[counts_N > 0])


def _difference(cells: _Cells, ours_RK: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[R]`: the mean score of the responses in the K cells of each row less the mean of all other responses."""
    counts_R, sums_R = (values[ours_RK].sum(1) for values in cells)
    other_counts_R, other_sums_R = cells.counts.sum() - counts_R, cells.sums.sum() - sums_R
    return np.asarray(sums_R / counts_R - other_sums_R / other_counts_R)
