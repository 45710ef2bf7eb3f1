"""From rollouts to what the update needs: scores, shaped rewards, advantages and returns."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_rlhf.core import advantages as core_advantages
from ppo_rlhf.core import rewards as core_rewards
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.statistics import masked_whiten
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.packing import PackedSequences
from ppo_rlhf.training.rewards import RewardScorer
from ppo_rlhf.training.rollout import Rollouts, first_epoch_micro_batches
from ppo_rlhf.training.scoring import scatter_rows
from ppo_rlhf.training.state import TrainingState


@dataclass(frozen=True)
class Scores:
    """What rewards and critic say of B rollouts."""

    total: Tensor  # [B], weighted sum of the components
    components: dict[str, Tensor]  # name -> [B], before weights
    values: Tensor  # [B, T + 1]: column t is V(s_t), before response token t; the last is behind the longest response
    seconds: float


@dataclass(frozen=True)
class ShapedRewards:
    """Token rewards of B rollouts; 0 in padding."""

    rewards: Tensor  # [B, T], what GAE sums up
    kl: Tensor  # [B, T], k1 = log pi - log pi_ref, nats
    kl_penalty: Tensor  # [B, T], the chosen estimator, nats
    kl_coef: float
    scores: Tensor  # [B], as given by the rewards, before clip and penalties


@dataclass(frozen=True)
class Experience:
    """All that the update needs of one iteration."""

    rollouts: Rollouts
    scores: Scores
    shaped_rewards: ShapedRewards
    advantages: Tensor  # [B, T], whitened if asked for, 0 in padding
    returns: Tensor  # [B, T], 0 in padding


def response_values(state: TrainingState, packed: PackedSequences) -> Tensor:
    """Return the critic's values of the states s_0 … s_T, `[B, T + 1]`; column t comes before response token t."""
    values: Tensor = state.critic(packed.input_ids, packed.attention_mask, packed.position_ids)
    return values[:, -packed.response_ids.shape[1] - 1 :]


def score_responses(rollouts: Rollouts, scorer: RewardScorer, state: TrainingState) -> Scores:
    """Score the responses and value every state of them."""
    started = time.perf_counter()
    config = state.config
    scored = scorer.score(rollouts.response_batch())
    rows, width = rollouts.response_ids.shape
    values = torch.zeros(rows, width + 1, dtype=rollouts.old_logprobs.dtype)
    with torch.no_grad():
        for group in first_epoch_micro_batches(config, rollouts.iteration):
            packed = rollouts.pack(group, state.sampling.pad_token_id, state.device)
            scatter_rows(values, group, response_values(state, packed))
    return Scores(
        total=scored.total.to("cpu", values.dtype),
        components={name: component.to("cpu", values.dtype) for name, component in scored.components.items()},
        values=values,
        seconds=time.perf_counter() - started,
    )


def shape_rewards(rollouts: Rollouts, scores: Scores, state: TrainingState) -> ShapedRewards:
    """Turn scores into token rewards: clip, missing-EOS penalty, per-token KL, optional whitening, in that order."""
    config, mask = state.config, rollouts.mask
    kl = torch.where(mask, rollouts.old_logprobs - rollouts.reference_logprobs, 0.0)
    penalty = torch.where(
        mask, kl_estimate(rollouts.old_logprobs, rollouts.reference_logprobs, config.kl_estimator), 0.0
    )
    rewards = core_rewards.shape_rewards(
        adjusted_scores(scores.total, rollouts.terminated, config), penalty, mask, state.kl_controller.kl_coef
    )
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    return ShapedRewards(rewards, kl, penalty, state.kl_controller.kl_coef, scores.total)


def adjusted_scores(scores: Tensor, terminated: Tensor, config: PPOConfig) -> Tensor:
    """Return `[B]` scores after the clip and the missing-EOS penalty (which the clip does not touch)."""
    if config.reward_clip is not None:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)
    if config.missing_eos_penalty is not None:
        scores = torch.where(terminated, scores, scores - config.missing_eos_penalty)
    return scores


def estimate_advantages(
    rollouts: Rollouts, scores: Scores, shaped_rewards: ShapedRewards, config: PPOConfig
) -> Experience:
    """Estimate advantages and returns by GAE; nothing is bootstrapped past a response's last token."""
    advantages, returns = core_advantages.generalized_advantage_estimate(
        shaped_rewards.rewards, scores.values[:, :-1], rollouts.mask, config.gamma, config.lam
    )
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, rollouts.mask)
    return Experience(rollouts, scores, shaped_rewards, advantages, returns)


def sample_table(
    rollouts: Rollouts, scores: Scores, shaped_rewards: ShapedRewards, limit: int = 20
) -> dict[str, list[object]]:
    """Return the first `limit` rollouts as columns: prompt, response, score, KL (nats over the response), stopped."""
    return {
        "prompt": list(rollouts.prompts.texts[:limit]),
        "response": list(rollouts.completions[:limit]),
        "score": scores.total[:limit].tolist(),
        "kl": shaped_rewards.kl.sum(-1)[:limit].tolist(),
        "stopped": rollouts.terminated[:limit].tolist(),
    }
