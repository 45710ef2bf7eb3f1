"""Computes the update's inputs from rollouts (scores, shaped rewards, advantages, returns), and a completions table."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import assert_never

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core import advantages as core_advantages
from ppo_rlhf.core import rewards as core_rewards
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.core.importance_weights import importance_weights
from ppo_rlhf.core.kl import FixedKLController
from ppo_rlhf.core.statistics import RunningMoments, masked_whiten
from ppo_rlhf.core.turns import compact, compact_mask, spread
from ppo_rlhf.ppo.batch_sampling import Sampler, response_batch
from ppo_rlhf.ppo.progress import REWARDS, Progress
from ppo_rlhf.ppo.rollouts import Rollouts
from ppo_rlhf.rewards.scoring import RewardScorer, Scores
from ppo_rlhf.rewards.shaping import disagreements, final_scores, final_scores_apart, final_token_rewards

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """The inputs of one iteration's update."""

    rollouts: Rollouts
    scores: Scores
    rewards: Tensor  # [B, T], rewards after shaping
    advantages: Tensor  # [B, T], GAE advantages, whitened if `whiten_advantages` is true, 0 in padding
    returns: Tensor  # [B, T], returns that the critic learns, 0 in padding
    # [B, T] bool, True on the tokens that the losses of policy and critic count (`learning_mask`)
    mask: Tensor
    config: PPOConfig
    # [B], how far the reward components' scores are apart; None if `reward.combine` is `sum`
    disagreement: Tensor | None = None

    @cached_property
    def positive(self) -> Tensor | None:
        """`[B, T]` bool, True on the counted tokens of positive examples; None without `positive_threshold`."""
        threshold = self.config.positive_threshold
        return None if threshold is None else self.mask & (self.scores.total >= threshold)[:, None]

    @cached_property
    def behaviour_logprobs(self) -> Tensor:
        """`[B, T]`, log-probabilities in the denominator of the policy's ratio: those before the update, or with
        `importance_low` the sampler's.

        Raises:
            ConfigError: The responses were sampled elsewhere, without their sampler's log-probabilities.
        """
        old = self.rollouts.old_logprobs
        return _sampler_logprobs(self.rollouts, self.config).to(old.dtype) if self.config.masks_tokens else old

    @cached_property
    def weighted_advantages(self) -> Tensor:
        """`[B, T]`, the advantages, multiplied by importance weights if `ppo.importance_cap` is set.

        Raises:
            ConfigError: The responses were sampled elsewhere, without their sampler's log-probabilities.
        """
        cap, rollouts = self.config.importance_cap, self.rollouts
        if cap is None:
            return self.advantages
        sampled = _sampler_logprobs(rollouts, self.config)
        return self.advantages * importance_weights(rollouts.old_logprobs, sampled, rollouts.mask, cap)


@dataclass
class Shaping:
    """What rewards depend on apart from the scores: the KL controller, and the moments of earlier scores."""

    config: PPOConfig
    kl_controller: FixedKLController  # holds the current KL coefficient
    # Mean and variance of all scores so far, before reward shaping
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    # Running mean and variance of each reward component's scores; empty unless `Scores.measured` names components
    component_moments: dict[str, RunningMoments] = field(default_factory=dict)

    def follow(self, scores: Scores, kl: float, iteration: int) -> None:
        """Update the moments by an iteration's scores, and the controller by its KL, in nats per response."""
        # Update with finite scores only, because a NaN would stay in the running mean
        self.reward_moments.update(scores.total, scores.total.isfinite())
        for name in scores.measured:
            component_scores = scores.components[name]
            moments = self.component_moments.setdefault(name, RunningMoments())
            moments.update(component_scores, component_scores.isfinite())
            if iteration == 1 and moments.m2 == 0.0 and scores.apart is not None:
                log.warning(
                    "reward/%s is %g for each of the first %d responses; normalised alone it adds 0 until it varies",
                    *(name, moments.mean, self.config.batch_size),
                )
        # The controller follows KL from the policy's first iteration on, as in TRL, verl and OpenRLHF. KL starts at 0,
        # so beta falls at first: with `kl_horizon` at a fifth of the episodes by 1 % in the first 1 % of the iterations
        if iteration > self.config.critic_warmup_iterations:
            self.kl_controller.update(kl, self.config.batch_size)


def score_responses(rollouts: Rollouts, scorer: RewardScorer, sampler: Sampler, progress: Progress) -> Scores:
    """Return the scores of all responses; with `drop_uniform_prompts` `rollouts.scores` holds the scores already."""
    progress.requests.meet()
    with progress.clock.timed(REWARDS):
        scores = rollouts.scores
        if scores is None:
            batch = response_batch(rollouts.prompts, rollouts.responses, sampler.tokenizer)
            scores = scorer.score(batch, sampler.halving)
        sampler.halving.agree()  # nothing is sampled or scored in the rest of the iteration
        return scores


def shape_rewards(rollouts: Rollouts, scores: Scores, shaping: Shaping) -> Tensor:
    """Turn scores into token rewards `[B, T]`: normalisation, scale, clip, penalties, per-token KL, optional whitening.

    Only tokens that the policy wrote get rewards; the environment's tokens and padding get 0. The score of a response
    is added to the reward of the policy's last token.

    Raises:
        CheckpointError: The run was resumed with another `reward.normalise`.
        ConfigError: A setting supports only scores of whole responses, not rewards per token.
    """
    config, mask, responses = shaping.config, rollouts.mask, rollouts.responses
    dtype = rollouts.old_logprobs.dtype
    whole, by_token = scores.total, scores.token_rewards
    if by_token is not None:
        whole = whole - by_token.sum(-1)
        by_token = nn.functional.pad(by_token, (0, mask.shape[1] - by_token.shape[1]))
        by_token = compact(final_token_rewards(by_token, responses.terminated, config), mask).to(dtype)
    ends = responses.terminated, responses.lengths
    if scores.apart is None:
        final = final_scores(whole, *ends, shaping.reward_moments, config)
    else:
        if rollouts.iteration > 1 and not shaping.component_moments:
            raise CheckpointError(
                f"reward.normalise=component: in the {rollouts.iteration - 1} iterations of this checkpoint the total "
                "was normalised; set reward.normalise=total, or start a new run"
            )
        final = final_scores_apart(scores, *ends, shaping.component_moments, config)
    rewards = core_rewards.shape_rewards(
        final.to(dtype),
        compact(rollouts.kl_penalty(config.kl_estimator), mask),
        compact_mask(mask),
        kl_price(config, shaping.kl_controller.kl_coef),
        token_rewards=by_token,
    )
    rewards = spread(rewards, mask)
    return masked_whiten(rewards, mask, shift_mean=False) if config.whiten_rewards else rewards


def kl_price(config: PPOConfig, kl_coef: float) -> float:
    """Return what a nat of KL costs a token's reward: the KL coefficient, or 0 if the KL is in the loss."""
    match config.kl_in:
        case "reward":
            return kl_coef
        case "loss":
            return 0.0
        case unknown:
            assert_never(unknown)


def estimate_advantages(rollouts: Rollouts, scores: Scores, rewards: Tensor, shaping: Shaping) -> Experience:
    """Estimate advantages and returns by GAE.

    The value after a response's last token counts as 0. With `truncated_responses=bootstrap` the critic's value after
    the last token of a cut-off response stands for all later rewards. `lam_critic` sets the returns' own lambda;
    `lam_alpha` sets a lambda for the advantages of each response by the response's length. GAE leaves out an
    environment's tokens, as if the policy's turns directly followed each other.
    """
    config, mask, values = shaping.config, rollouts.mask, rollouts.values
    bootstrap_values = None
    if config.truncated_responses == "bootstrap":
        after_end = values.gather(1, rollouts.responses.lengths[:, None])[:, 0]
        bootstrap_values = torch.where(rollouts.responses.terminated, 0.0, after_end)

    def estimate(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        estimated = core_advantages.generalized_advantage_estimate(
            compact(rewards, mask),
            compact(values[:, :-1], mask),
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
    counted = learning_mask(rollouts, config)
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, counted)
    apart = None if scores.combine == "sum" else disagreements(scores, shaping.component_moments)
    return Experience(rollouts, scores, rewards, advantages, returns, counted, config, apart)


def learning_mask(rollouts: Rollouts, config: PPOConfig) -> Tensor:
    """Return `[B, T]` bool, False on cut-off responses with `truncated_responses=mask`, else `rollouts.mask`."""
    match config.truncated_responses:
        case "mask":
            return rollouts.mask & rollouts.responses.terminated[:, None]
        case "keep" | "penalise" | "replace" | "bootstrap":
            return rollouts.mask
        case unknown:
            assert_never(unknown)


def _sampler_logprobs(rollouts: Rollouts, config: PPOConfig) -> Tensor:
    """Return the log-probabilities `[B, T]` under which the responses were sampled."""
    sampler_logprobs = rollouts.responses.sampler_logprobs
    if sampler_logprobs is None:
        name = "importance_low" if config.masks_tokens else "importance_cap"
        raise ConfigError(
            f"ppo.{name}={getattr(config, name):g} needs the sampler's log-probabilities, which "
            f"these responses do not have: let PPOTrainer.train() sample, or leave "
            f"ppo.{name} out (ppo.rollout_engine=vllm needs it)"
        )
    return sampler_logprobs


def completion_rows(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """Return one row per response of the iteration, in the iteration's order.

    Columns: iteration, prompt, completion, score (before shaping), `score_<name>` of each reward if there are several,
    disagreement (of the components' scores, unless `reward.combine` is `sum`), kl (k1 summed over the response, nats),
    advantage (mean over the response's tokens), tokens (number of the policy's tokens, stop token included), stopped
    (False if the response was cut off), prompt_chat (the messages as JSON, if some prompts are chats), and the prompts'
    columns. A prompts' column whose name is taken is named `prompts.<name>`.
    """
    rollouts, scores = experience.rollouts, experience.scores
    tokens = rollouts.mask.sum(-1)
    batch = response_batch(rollouts.prompts, rollouts.responses, tokenizer)
    columns: dict[str, list[object]] = {
        "iteration": [rollouts.iteration] * len(tokens),
        "prompt": list(batch.prompts),
        "completion": list(batch.completions),
        "score": scores.total.tolist(),
        "kl": rollouts.kl.sum(-1).tolist(),
        "advantage": (experience.advantages.sum(-1) / tokens.clamp(min=1)).tolist(),
        "tokens": tokens.tolist(),
        "stopped": rollouts.responses.terminated.tolist(),
    }
    if len(scores.components) > 1:
        columns |= {f"score_{name}": values.tolist() for name, values in scores.components.items()}
    if experience.disagreement is not None:
        columns["disagreement"] = experience.disagreement.tolist()
    if rollouts.prompts.has_chats:
        columns["prompt_chat"] = list(rollouts.prompts.chats)
    others = rollouts.prompts.columns.items()
    columns |= {f"prompts.{name}" if name in columns else name: values[:] for name, values in others}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
