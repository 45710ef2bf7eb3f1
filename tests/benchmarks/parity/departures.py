"""This project's departures from TRL's PPO, each undone by itself: what one iteration looks like in TRL's way.

Nothing here is a setting of the product. The two that need no code are plain hyperparameters: one optimiser step an
epoch is `num_mini_batches=1` (TRL's effect of `num_mini_batches` under gradient accumulation, but for the weights of
the micro-batches' means), no clipping is a `max_grad_norm` that is never reached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.responses import length_mask
from ppo_rlhf.core.statistics import masked_whiten
from ppo_rlhf.ppo.experience import Experience, Scores, estimate_advantages, shape_rewards
from ppo_rlhf.ppo.rollout import Rollouts
from ppo_rlhf.ppo.state import TrainingState

NEVER_CLIPPED = 1e9


@dataclass(frozen=True)
class Departures:
    """Which of them are undone."""

    score_after_end: bool = False
    """The score sits one slot behind the last token of a response that ended early, and the critic learns that slot."""
    sampler_logprobs: bool = False
    """Old log-probabilities are those of the decoding loop."""
    one_step_an_epoch: bool = False
    """Minibatches do not step; each epoch does."""
    unclipped: bool = False
    """Gradients are not clipped."""

    def settings(self, num_mini_batches: int) -> dict[str, Any]:
        """Return the hyperparameters that undo the departures that are hyperparameters."""
        return {
            "num_mini_batches": 1 if self.one_step_an_epoch else num_mini_batches,
            **({"max_grad_norm": NEVER_CLIPPED} if self.unclipped else {}),
        }

    def rollouts(self, rollouts: Rollouts) -> Rollouts:
        """Return the rollouts as the update shall see them."""
        if not self.sampler_logprobs:
            return rollouts
        return replace(rollouts, old_logprobs=rollouts.sampler_logprobs.to(rollouts.old_logprobs.dtype))

    def experience(self, rollouts: Rollouts, scores: Scores, state: TrainingState, config: PPOConfig) -> Experience:
        """Return rewards, advantages and returns."""
        if self.score_after_end:
            return _scored_after_the_end(rollouts, scores, state, config)
        return estimate_advantages(rollouts, scores, shape_rewards(rollouts, scores, state), config)


VARIANTS = {
    "default": Departures(),
    "score after the end": Departures(score_after_end=True),
    "sampler's log-probabilities": Departures(sampler_logprobs=True),
    "one step an epoch": Departures(one_step_an_epoch=True),
    "gradients not clipped": Departures(unclipped=True),
    "all but the stepping": Departures(score_after_end=True, sampler_logprobs=True, unclipped=True),
}
"""By the name of the ablation. The last is TRL with gradient_accumulation_steps 1, rebuilt from our parts."""


def _scored_after_the_end(rollouts: Rollouts, scores: Scores, state: TrainingState, config: PPOConfig) -> Experience:
    """Give each response that ended early one slot more: reward and value live there, but no action.

    The slot's KL is 0, since both log-probabilities are 0 in padding; its value V(s_L+1) is read at the last token; its
    advantage is set to 0, so that the policy learns nothing there. Whitening leaves it out, as TRL does.
    """
    width = rollouts.response_ids.shape[1]
    longer = replace(rollouts, lengths=(rollouts.lengths + 1).clamp(max=width))
    experience = estimate_advantages(
        longer, scores, shape_rewards(longer, scores, state), replace(config, whiten_advantages=False)
    )
    real = length_mask(rollouts.lengths, width)
    whitened = torch.where(real, masked_whiten(experience.advantages, real), 0.0)
    # the policy loss divides by the slots too: TRL's divides by the tokens
    return replace(experience, advantages=whitened * (longer.lengths.sum() / rollouts.lengths.sum()))
