"""Compares the judge's scores of two policies' responses to one prompt that have the same reward.

What differs between such responses is what the reward does not see.
"""

from __future__ import annotations

import numpy as np

from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, PolicyEvaluation
from ppo_rlhf.evaluation.since_best import by_chance
from ppo_rlhf.evaluation.verdict import MIN_PROMPTS

CERTAIN = 0.01
"""Significance level of a fall of the judge's score at equal reward."""


def compare_at_equal_reward(policy: PolicyEvaluation, sft: PolicyEvaluation) -> dict[str, float]:
    """Return `eval/judge_gap`: the judge's score of the policy's responses less that of SFT's of the same reward.

    A policy that exploits its reward finds responses that the reward pays for and the judge does not. Then the judge
    scores the policy's responses lower than SFT's responses of the same reward, even if the judge's mean score rose. A
    judge that is only noisier than the reward shows no gap, because noise does not tell the two policies apart.

    Only responses to the same prompt are compared, the i-th of one policy with the i-th of the other, where both have
    the same reward. Across prompts the comparison would blame a policy for solving harder prompts than SFT does: there
    the judge's scores are lower, whoever answers (Simpson's paradox).

    `eval/judge_gap` is the mean over these pairs. `eval/judge_gap_p` is the probability of a gap as low if at equal
    reward the judge did not tell the policies apart: then either response of a pair could as well be the other policy's
    (the sign-flip test `by_chance` of the prompts' sums). `eval/judge_gap_prompts` is the number of prompts with such a
    pair. The result is empty without a judge, if the judge is the reward, and with fewer than `MIN_PROMPTS` such
    prompts: rewards of many values, as a reward model's, are hardly ever equal.
    """
    ours, theirs = (each.judges.get(JUDGE_COLUMN, each.rewards) for each in (policy, sft))
    if np.array_equal(ours, policy.rewards) and np.array_equal(theirs, sft.rewards):
        return {}
    is_equal_Nn = policy.by_prompt(policy.rewards == sft.rewards)
    gaps_Nn = np.where(is_equal_Nn, policy.by_prompt(ours - theirs), 0.0)
    compared = is_equal_Nn.any(axis=1)
    if compared.sum() < MIN_PROMPTS:
        return {}
    return {
        "eval/judge_gap": float(gaps_Nn.sum() / is_equal_Nn.sum()),
        "eval/judge_gap_p": by_chance(-gaps_Nn.sum(axis=1)[compared]),
        "eval/judge_gap_prompts": int(compared.sum()),
    }
