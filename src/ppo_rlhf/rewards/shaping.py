"""From the raw score of a response to the final score that its last token gets as reward.

In this order: normalisation, scale, clip, penalties for cut-off and overlong responses. Penalties are not clipped.
Rewards by token are only scaled.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.rewards import clip_scores, overlong_penalty
from ppo_rlhf.core.statistics import RunningMoments, masked_whiten


def final_scores(
    scores: Tensor, terminated: Tensor, lengths: Tensor, moments: RunningMoments, config: PPOConfig
) -> Tensor:
    """Return the final scores `[B]` of raw scores `[B]`.

    `terminated` `[B]` is True where a stop token ended the response, `lengths` `[B]` counts its tokens, and `moments`
    are of all scores before this batch; they are left as they are.
    """
    return penalised(normalised(scores, moments, config), terminated, lengths, config)


def final_token_rewards(token_rewards: Tensor, terminated: Tensor, config: PPOConfig) -> Tensor:
    """Return the token rewards `[B, T]` times `reward_scale`; 0 where a penalty replaces a cut-off response's score.

    Raises:
        ConfigError: A setting of PPO is defined only for scores of whole responses.
    """
    check_token_rewards(config)
    if config.truncated_responses == "replace":
        token_rewards = torch.where(terminated[:, None], token_rewards, 0.0)
    return token_rewards * config.reward_scale


def check_token_rewards(config: PPOConfig) -> None:
    """Raise `ConfigError` if the reward cannot be given by token."""
    for name in ("reward_normalisation", "reward_clip"):
        if name in config.not_default():
            raise ConfigError(
                f"ppo.{name}={getattr(config, name)} is for scores of whole responses, but a reward function returns "
                "one number a token; leave the setting out. ppo.reward_scale also scales the numbers of tokens"
            )


def normalised(scores: Tensor, moments: RunningMoments, config: PPOConfig) -> Tensor:
    """Return `[B]` scores after normalisation, scale and clip. Scores without spread are normalised to 0."""
    everything = torch.ones_like(scores, dtype=torch.bool)
    if config.reward_normalisation == "batch":
        scores = masked_whiten(scores, everything)
    elif config.reward_normalisation == "running":
        so_far = copy.copy(moments)
        so_far.update(scores, scores.isfinite())
        scores = masked_whiten(scores, everything, moments=(so_far.mean, so_far.variance))
    return clip_scores(scores * config.reward_scale, config.reward_clip)


def penalised(scores: Tensor, terminated: Tensor, lengths: Tensor, config: PPOConfig) -> Tensor:
    """Return `[B]` scores with the penalties of `truncated_responses`, `missing_eos_penalty` and `overlong_buffer`."""
    if config.overlong_buffer is not None:
        penalty = overlong_penalty(lengths, config.response_length, config.overlong_buffer)
        scores = scores - penalty.to(scores.dtype)
    if config.truncated_responses == "bootstrap":
        return torch.where(terminated, scores, 0.0)  # GAE uses V(s_T) instead
    if config.missing_eos_penalty is None:
        return scores
    replace = config.truncated_responses == "replace"
    return torch.where(terminated, scores, (0.0 if replace else scores) - config.missing_eos_penalty)
