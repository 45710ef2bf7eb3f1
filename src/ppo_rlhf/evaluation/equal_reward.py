"""Compares the judge's scores of two policies' responses that have the same reward: what the reward does not see."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, PolicyEvaluation
from ppo_rlhf.evaluation.since_best import by_chance
from ppo_rlhf.evaluation.verdict import MIN_PROMPTS

CERTAIN = 0.01
"""Significance level of a fall of the judge's score at equal reward."""


def compare_at_equal_reward(policy: PolicyEvaluation, sft: PolicyEvaluation) -> dict[str, float]:
    """Return `eval/judge_gap`: the judge's score of the policy's responses less SFT's, where the rewards are equal.

    A policy that exploits its reward finds responses that the reward pays for and the judge does not. Then the judge
    scores the policy's responses lower than SFT's responses to the same prompt with the same reward, even if the
    judge's mean score rose. A judge that is only noisier than the reward shows no gap, because noise does not tell the
    two policies apart.

    The gap of a prompt is the mean over the rewards that both policies got for the prompt, each weighted by the smaller
    number of responses. `eval/judge_gap` is the mean over prompts, `eval/judge_gap_p` the probability of a gap as low
    if only noise differed (`by_chance`), and `eval/judge_gap_prompts` the number of prompts. The result is empty
    without a judge, if the judge is the reward, and if fewer than `MIN_PROMPTS` prompts have equal rewards: rewards of
    many values, as a reward model's, are hardly ever equal.
    """
    sides = [
        (each.by_prompt(each.rewards), each.by_prompt(each.judges.get(JUDGE_COLUMN, each.rewards)))
        for each in (policy, sft)
    ]
    if all(np.array_equal(rewards, scores) for rewards, scores in sides):
        return {}
    gaps = [
        gap
        for ours, scores, theirs, scores_of_sft in zip(*sides[0], *sides[1], strict=True)
        if (gap := _gap(ours, scores, theirs, scores_of_sft)) is not None
    ]
    if len(gaps) < MIN_PROMPTS:
        return {}
    gaps_N = np.array(gaps)
    chance = by_chance(-gaps_N) if gaps_N.any() else 1.0
    return {"eval/judge_gap": float(gaps_N.mean()), "eval/judge_gap_p": chance, "eval/judge_gap_prompts": len(gaps)}


def _gap(
    ours_n: NDArray[np.float64],
    scores_n: NDArray[np.float64],
    theirs_n: NDArray[np.float64],
    scores_of_sft_n: NDArray[np.float64],
) -> float | None:
    """Return the judge's score of one prompt's n responses less SFT's, at equal reward; None if no reward is equal."""
    total = weights = 0.0
    for reward in set(ours_n.tolist()) & set(theirs_n.tolist()):
        of_ours, of_theirs = scores_n[ours_n == reward], scores_of_sft_n[theirs_n == reward]
        weight = min(len(of_ours), len(of_theirs))
        total += weight * float(of_ours.mean() - of_theirs.mean())
        weights += weight
    return total / weights if weights else None
