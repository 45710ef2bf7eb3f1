"""Turn the raw score of a response into the final score, which is the reward of the response's last token.

The steps of the shaping, in this order: normalisation (of the sum of the reward components, or of each reward component
before the sum), scale, clip, penalties for truncated and overlong responses. Penalties are not clipped. Per-token
rewards are only scaled.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.reward_combination import combine_scores, disagreement
from ppo_rlhf.core.rewards import clip_scores, overlong_penalty
from ppo_rlhf.core.statistics import RunningMoments, masked_whiten
from ppo_rlhf.rewards.scoring import Scores


def final_scores(
    scores: Tensor, terminated: Tensor, lengths: Tensor, moments: RunningMoments, config: PPOConfig
) -> Tensor:
    """Return the final scores `[B]` of raw scores `[B]`.

    `terminated` `[B]` is True where a stop token ended the response. `lengths` `[B]` counts the tokens of each
    response. `moments` are the statistics of all scores before this batch; this function does not update them.
    """
    return penalised(normalised(scores, moments, config), terminated, lengths, config)


def final_scores_apart(
    scores: Scores,
    terminated: Tensor,
    lengths: Tensor,
    moments: Mapping[str, RunningMoments],
    config: PPOConfig,
) -> Tensor:
    """Return the final scores `[B]` if each reward component is normalised separately before they are combined.

    The normalisation is that of GDPO (Liu et al. 2026, arXiv:2601.05242), but its statistics are over the batch or the
    run instead of the responses to one prompt. A reward component whose scores are all equal contributes 0. `moments`
    are the statistics of each reward component's scores before this batch.

    Raises:
        ConfigError: `ppo.reward_normalisation` is `none`.
    """
    check_normalisation("component", config)
    parts = [
        weight * _normalised(scores.components[name], moments.get(name, RunningMoments()), config)
        for name, weight in (scores.apart or {}).items()
    ]
    combined = combine_scores(torch.stack(parts), scores.combine)
    return penalised(_scaled(combined, config), terminated, lengths, config)


def disagreements(scores: Scores, moments: Mapping[str, RunningMoments]) -> Tensor:
    """Return how far the components' scores of each response are apart, `[B]`.

    The number is the standard deviation over components of the normalised scores. Whatever `ppo.reward_normalisation`
    is, the mean and the variance of the normalisation are over the run, so that numbers of different iterations have
    one unit. `moments` are the same as in `final_scores_apart`.
    """
    over_run = [_whitened(each, moments.get(name, RunningMoments())) for name, each in scores.components.items()]
    return disagreement(torch.stack(over_run))


def deviations(scores: Scores, moments: Mapping[str, RunningMoments], config: PPOConfig) -> dict[str, float]:
    """Return the standard deviation by which each separately normalised reward component was divided.

    The result leaves out the epsilon that the normalisation adds to the variance. `moments` are the same as in
    `final_scores_apart`.
    """
    deviation = {}
    for name in scores.apart or ():
        before = moments.get(name) if config.reward_normalisation == "running" else None
        deviation[name] = _with_batch(before or RunningMoments(), scores.components[name]).std
    return deviation


def check_normalisation(normalise: str, config: PPOConfig) -> None:
    """Raise `ConfigError` if `normalise` is `component` but `ppo.reward_normalisation` is `none`."""
    if normalise == "component" and config.reward_normalisation == "none":
        raise ConfigError(
            "reward.normalise=component and ppo.reward_normalisation=none: nothing says how the components are "
            "normalised; set ppo.reward_normalisation to running or batch, or leave out reward.normalise"
        )


def final_token_rewards(token_rewards: Tensor, terminated: Tensor, config: PPOConfig) -> Tensor:
    """Return the per-token rewards `[B, T]` times `reward_scale`.

    Truncated responses get 0 for every token if `truncated_responses` is "replace".

    Raises:
        ConfigError: A setting of PPO that is defined only for scores of whole responses is set.
    """
    check_token_rewards(config)
    match config.truncated_responses:
        case "replace":
            token_rewards = torch.where(terminated[:, None], token_rewards, 0.0)
        case "keep" | "penalise" | "mask" | "bootstrap":
            pass
        case unknown:
            assert_never(unknown)
    return token_rewards * config.reward_scale


def check_token_rewards(config: PPOConfig) -> None:
    """Raise `ConfigError` if a setting of PPO does not support per-token rewards."""
    for name in ("reward_normalisation", "reward_clip"):
        if name in config.not_default():
            raise ConfigError(
                f"ppo.{name}={getattr(config, name)} applies to scores of whole responses, but a reward function "
                "returns one number per token; leave the setting out. ppo.reward_scale also scales per-token rewards"
            )


def normalised(scores: Tensor, moments: RunningMoments, config: PPOConfig) -> Tensor:
    """Return the scores `[B]` after normalisation, scale and clip. Scores that are all equal are normalised to 0."""
    return _scaled(_normalised(scores, moments, config), config)


def penalised(scores: Tensor, terminated: Tensor, lengths: Tensor, config: PPOConfig) -> Tensor:
    """Return the scores `[B]` with the penalties of `truncated_responses`, `missing_eos_penalty`, `overlong_buffer`."""
    if config.overlong_buffer is not None:
        overlong = overlong_penalty(lengths, config.response_length, config.overlong_buffer)
        scores = scores - overlong.to(scores.dtype)
    penalty = config.missing_eos_penalty
    match config.truncated_responses:
        case "bootstrap":
            # A truncated response gets 0 here, because GAE bootstraps with the critic's value V(s_T)
            return torch.where(terminated, scores, 0.0)
        case "replace":
            return scores if penalty is None else torch.where(terminated, scores, 0.0 - penalty)
        case "keep" | "penalise" | "mask":
            return scores if penalty is None else torch.where(terminated, scores, scores - penalty)
        case unknown:
            assert_never(unknown)


def _normalised(scores: Tensor, moments: RunningMoments, config: PPOConfig) -> Tensor:
    match config.reward_normalisation:
        case "none":
            return scores
        case "running":
            return _whitened(scores, moments)
        case "batch":
            return masked_whiten(scores, torch.ones_like(scores, dtype=torch.bool))
        case unknown:
            assert_never(unknown)


def _whitened(scores: Tensor, moments: RunningMoments) -> Tensor:
    """Return the scores after normalisation by the mean and the variance of the run, including this batch."""
    so_far = _with_batch(moments, scores)
    return masked_whiten(scores, torch.ones_like(scores, dtype=torch.bool), moments=(so_far.mean, so_far.variance))


def _with_batch(moments: RunningMoments, scores: Tensor) -> RunningMoments:
    """Return a copy of `moments` that also counts the finite scores of this batch."""
    updated = copy.copy(moments)
    updated.update(scores, scores.isfinite())
    return updated


def _scaled(scores: Tensor, config: PPOConfig) -> Tensor:
    return clip_scores(scores * config.reward_scale, config.reward_clip)
