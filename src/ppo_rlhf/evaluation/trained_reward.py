"""The reward that PPO trains on, of evaluated responses: combined, normalised, clipped and penalised as in training.

`eval/reward` is the weighted sum, or the mean, of the raw scores. With `reward.combine`, `reward.normalise`,
`ppo.reward_clip` or a penalty the raw scores may fall while the trained reward rises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.evaluation.policy import PolicyEvaluation
from ppo_rlhf.rewards.scoring import RewardScorer, Scores
from ppo_rlhf.rewards.shaping import final_scores, final_scores_apart, final_token_rewards

Parts = Mapping[str, Any]
"""What the trained reward of N responses is computed from, as lists: `whole` (scores of whole responses), `by_token`
(sums of per-token rewards), `terminated`, `lengths`, and `components`, each component's scores by its name."""


def reward_parts(evaluation: PolicyEvaluation) -> dict[str, Any]:
    """Return the `Parts` of an evaluation, which can be written as JSON; nothing if the evaluation has no `scores`."""
    scores = evaluation.scores
    if scores is None:
        return {}
    by_token = torch.zeros_like(scores.total) if scores.token_rewards is None else scores.token_rewards.sum(-1)
    return {
        "whole": (scores.total - by_token).tolist(),
        "by_token": by_token.tolist(),
        "terminated": evaluation.terminated.tolist(),
        "lengths": evaluation.lengths.tolist(),
        "components": {name: values.tolist() for name, values in scores.components.items()},
    }


@dataclass(frozen=True)
class TrainedReward:
    """How a run turns scores into rewards at one checkpoint."""

    scorer: RewardScorer
    config: PPOConfig
    moments: RunningMoments  # mean and variance of all scores so far
    component_moments: Mapping[str, RunningMoments]  # likewise, of each component's scores

    def rise(self, now: Parts, before: Parts) -> float | None:
        """Return the mean trained reward of the responses `now` less that of the responses `before`.

        Both are normalised together with this checkpoint's moments, as one batch of training would be: the moments grow
        while a run trains, so rewards that were normalised at their own time have no common scale. The KL penalty is
        left out. The result is None if the responses were scored by other components.
        """
        if not now or not before or now["components"].keys() != before["components"].keys():
            return None

        def joined(key: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor([*before[key], *now[key]], dtype=dtype)

        components = {
            name: torch.tensor([*before["components"][name], *values], dtype=torch.float64)
            for name, values in now["components"].items()
        }
        whole, by_token = joined("whole"), joined("by_token")
        terminated, lengths = joined("terminated", torch.bool), joined("lengths", torch.long)
        if self.scorer.normalise == "component":
            weights = {name: weight for name, weight, _ in self.scorer.components}
            scores = Scores(whole, components, None, weights, self.scorer.combine)
            rewards = final_scores_apart(scores, terminated, lengths, self.component_moments, self.config)
        else:
            rewards = final_scores(whole, terminated, lengths, self.moments, self.config)
        if by_token.any():
            rewards = rewards + final_token_rewards(by_token[:, None], terminated, self.config)[:, 0]
        earlier = len(before["whole"])
        return float(rewards[earlier:].mean() - rewards[:earlier].mean())
