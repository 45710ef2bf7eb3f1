"""From rollouts to the update's input: scores, shaped rewards, advantages and returns; and its tables to read."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core import advantages as core_advantages
from ppo_rlhf.core import rewards as core_rewards
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.statistics import masked_whiten
from ppo_rlhf.core.turns import compact, compact_mask, spread
from ppo_rlhf.models.transfers import on_device, to_device
from ppo_rlhf.ppo.batch import first_epoch, first_hands
from ppo_rlhf.ppo.logprobs import CriticForward, filled_rows
from ppo_rlhf.ppo.precision import autocast, deterministic
from ppo_rlhf.ppo.rollout import Rollouts
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import gather_dealt, own_rank
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.rewards.shaping import final_scores, final_token_rewards


@dataclass(frozen=True)
class Scores:
    """Scores by the rewards and values by the critic of B rollouts."""

    total: Tensor  # [B] float64, weighted sum of the components
    components: dict[str, Tensor]  # name -> [B], before weights
    values: Tensor  # [B, T + 1]: column t is V(s_t), before response token t; column lengths[i] is after row i's last
    seconds: float
    token_rewards: Tensor | None = None  # [B, T], the part of `total` that functions gave by token; None: there is none


@dataclass(frozen=True)
class ShapedRewards:
    """Token rewards of B rollouts; 0 in padding."""

    rewards: Tensor  # [B, T], the input of GAE
    kl: Tensor  # [B, T], k1 = log pi - log pi_ref, nats
    kl_penalty: Tensor  # [B, T], the chosen estimator, nats
    kl_coef: float
    scores: Tensor  # [B], as given by the rewards, before normalisation, clip and penalties


@dataclass(frozen=True)
class Experience:
    """The update's input of one iteration."""

    rollouts: Rollouts
    scores: Scores
    shaped_rewards: ShapedRewards
    advantages: Tensor  # [B, T], whitened if asked for, 0 in padding
    returns: Tensor  # [B, T], 0 in padding


def score_responses(rollouts: Rollouts, scorer: RewardScorer, state: TrainingState) -> Scores:
    """Score each response and compute the critic's value of each of its states."""
    started = time.perf_counter()
    scored = rollouts.scored or scorer.score(rollouts.texts)
    values = critic_values(rollouts, state) if rollouts.values is None else rollouts.values
    token_rewards = scored.token_rewards
    if token_rewards is not None:
        missing = rollouts.responses.response_ids.shape[1] - token_rewards.shape[1]
        token_rewards = nn.functional.pad(token_rewards, (0, missing))
    return Scores(scored.total, scored.components, values, time.perf_counter() - started, token_rewards)


def critic_values(rollouts: Rollouts, state: TrainingState) -> Tensor:
    """Return the values `[B, T + 1]` of a critic of its own, from the forward passes that the first epoch repeats."""
    rows, width = rollouts.responses.response_ids.shape
    groups, hands = first_epoch(rollouts.epochs), first_hands(rollouts.epochs)
    forward = CriticForward(state.critic)
    batches = rollouts.sequences(groups, state)
    with (
        torch.no_grad(),
        on_device(forward, state.device),
        deterministic(state.config),
        autocast(state.config, state.device),  # around all passes, so that each weight is cast once
    ):
        found = [forward(batch) for batch in to_device(batches, state.device)]
    values = filled_rows(rows, width + 1, groups, found, state.statistics_dtype)
    return gather_dealt(values[hands[own_rank()]], hands)


def shape_rewards(rollouts: Rollouts, scores: Scores, state: TrainingState) -> ShapedRewards:
    """Turn scores into token rewards: normalisation, scale, clip, penalties, per-token KL, optional whitening.

    Only the policy's tokens have rewards, and the score is on the last of them.
    """
    config, mask, responses = state.config, rollouts.mask, rollouts.responses
    kl = torch.where(mask, rollouts.old_logprobs - rollouts.reference_logprobs, 0.0)
    penalty = rollouts.full_kl
    if penalty is None:
        penalty = kl_estimate(rollouts.old_logprobs, rollouts.reference_logprobs, config.kl_estimator)
    penalty = torch.where(mask, penalty, 0.0)
    kl_coef = state.kl_controller.kl_coef
    whole, by_token = scores.total, scores.token_rewards
    if by_token is not None:
        whole = whole - by_token.sum(-1)
        by_token = compact(final_token_rewards(by_token, responses.terminated, config), mask).to(kl.dtype)
    rewards = core_rewards.shape_rewards(
        final_scores(whole, responses.terminated, responses.lengths, state.reward_moments, config).to(kl.dtype),
        compact(penalty, mask),
        compact_mask(mask),
        kl_coef if config.kl_in == "reward" else 0.0,
        token_rewards=by_token,
    )
    rewards = spread(rewards, mask)
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    return ShapedRewards(rewards, kl, penalty, kl_coef, scores.total)


def learning_mask(rollouts: Rollouts, config: PPOConfig) -> Tensor:
    """Return `[B, T]` bool, True on the tokens that both losses count: without cut-off responses if they are masked."""
    if config.truncated_responses != "mask":
        return rollouts.mask
    return rollouts.mask & rollouts.responses.terminated[:, None]


def positive_mask(experience: Experience, mask: Tensor, config: PPOConfig) -> Tensor | None:
    """Return `[B, T]` bool, True on the tokens of `mask` in positive examples; None without `positive_threshold`."""
    threshold = config.positive_threshold
    return None if threshold is None else mask & (experience.scores.total >= threshold)[:, None]


def estimate_advantages(
    rollouts: Rollouts, scores: Scores, shaped_rewards: ShapedRewards, config: PPOConfig
) -> Experience:
    """Estimate advantages and returns by GAE.

    Nothing is bootstrapped past a response's last token, unless `truncated_responses` is bootstrap: then V(s_T) of a
    cut-off response stands for all later rewards. `lam_critic` gives the returns a lambda of their own, `lam_alpha` the
    advantages one for each response. An environment's tokens are skipped: the policy's first token of a turn follows
    its last one of the turn before.
    """
    mask = rollouts.mask
    bootstrap_values = None
    if config.truncated_responses == "bootstrap":
        after_end = scores.values.gather(1, rollouts.responses.lengths[:, None])[:, 0]
        bootstrap_values = torch.where(rollouts.responses.terminated, 0.0, after_end)

    def estimate(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        estimated = core_advantages.generalized_advantage_estimate(
            compact(shaped_rewards.rewards, mask),
            compact(scores.values[:, :-1], mask),
            compact_mask(mask),
            config.gamma,
            lam,
            bootstrap_values=bootstrap_values,
        )
        return spread(estimated[0], mask), spread(estimated[1], mask)

    advantages, returns = estimate(config.lam)
    if config.lam_critic is not None:
        _, returns = estimate(config.lam_critic)
    if config.lam_alpha is not None:
        advantages, _ = estimate(core_advantages.length_adaptive_lambda(mask.sum(-1), config.lam_alpha))
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, learning_mask(rollouts, config))
    return Experience(rollouts, scores, shaped_rewards, advantages, returns)


def completion_rows(experience: Experience) -> list[dict[str, object]]:
    """Return one row a response of the iteration, in its order.

    Columns: iteration, prompt, completion, score (as the rewards gave it), with several rewards `score_<name>` of each,
    kl (k1 over the response, nats), advantage (mean over its tokens), tokens (the policy's, stop token included) and
    stopped (false: cut off).
    """
    rollouts, scores = experience.rollouts, experience.scores
    tokens = rollouts.mask.sum(-1)
    columns: dict[str, list[object]] = {
        "iteration": [rollouts.iteration] * len(tokens),
        "prompt": list(rollouts.prompts.texts),
        "completion": list(rollouts.texts.completions),
        "score": scores.total.tolist(),
        "kl": experience.shaped_rewards.kl.sum(-1).tolist(),
        "advantage": (experience.advantages.sum(-1) / tokens.clamp(min=1)).tolist(),
        "tokens": tokens.tolist(),
        "stopped": rollouts.responses.terminated.tolist(),
    }
    if len(scores.components) > 1:
        columns |= {f"score_{name}": values.tolist() for name, values in scores.components.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
