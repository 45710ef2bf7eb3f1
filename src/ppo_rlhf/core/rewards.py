"""Computes the token rewards that PPO maximises: the score on a response's last token, minus a KL penalty per token."""

import torch
from torch import Tensor, nn

from ppo_rlhf.core.checks import (
    as_bool,
    check_one_per_row,
    check_prefix_mask,
    check_range,
    check_shape,
    compute_dtype,
    select,
)


def shape_rewards(
    scores: Tensor,
    kl: Tensor,
    mask: Tensor,
    kl_coef: float,
    *,
    reward_clip: float | None = None,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Compute r_t = −kl_coef · kl_t + token_reward_t + 1[t is the last real token] · clip(score, ±reward_clip).

    Args:
        scores: One score per response, [B], reward units.
        kl: KL estimate per token, [B, T], nats; padding may hold anything.
        mask: [B, T], True on the response's real tokens (its stop token included), a prefix of each row.
        kl_coef: Reward units per nat, >= 0.
        reward_clip: Scores are clipped to ± `reward_clip` before the KL penalty is subtracted; None: no clipping.
        token_rewards: Further reward of each token, [B, T], reward units, never clipped; padding may hold anything;
            None: 0.

    Returns:
        Token rewards [B, T], 0 in padding. A row without a real token is all 0, since it has no token for its score.

    Raises ShapeError if shapes do not fit or the mask has holes, and ConfigError if an option is out of range.

    Source: Ouyang et al. (2022), eq. 2, per token as in Stiennon et al. (2020); the score sits on the last real token
    (legacy TRL, OpenRLHF, verl), not one slot after it (TRL 0.14).
    """
    where = "shape_rewards"
    check_shape(where, "BT", kl=kl, mask=mask)
    check_one_per_row(where, kl.shape[0], scores=scores)
    check_range(where, at_least=0.0, kl_coef=kl_coef)
    is_response_BT = as_bool(mask)
    check_prefix_mask(where, is_response_BT)
    scores = clip_scores(scores, reward_clip)

    dtype = compute_dtype(scores, kl)
    penalty_BT = kl_coef * select(kl, is_response_BT, dtype)
    score_BT = select(scores[:, None].expand_as(kl), last_token_mask(is_response_BT), dtype)
    reward_BT = score_BT - penalty_BT
    if token_rewards is None:
        return reward_BT
    check_shape(where, None, kl=kl, token_rewards=token_rewards)
    return reward_BT + select(token_rewards, is_response_BT, dtype)


def clip_scores(scores: Tensor, reward_clip: float | None) -> Tensor:
    """Clip scores of any shape to ± `reward_clip` in reward units; None: no clipping.

    Raises ConfigError unless `reward_clip` is > 0.
    """
    if reward_clip is None:
        return scores
    check_range("clip_scores", above=0.0, reward_clip=reward_clip)
    return scores.clamp(-reward_clip, reward_clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Compute a penalty on long responses: min(max(length − (max_length − buffer), 0), buffer) / buffer.

    `lengths` [B] are in tokens, 0..max_length. The penalty [B], float64, is to be subtracted from the scores. The
    penalty is 0 up to max_length − buffer tokens, and rises linearly to 1 at max_length. Raises ShapeError if `lengths`
    is not [B], and ConfigError if `buffer` is outside 1..max_length.

    Source: Yu et al. (2025), "DAPO", arXiv:2503.14476, eq. 13, with the sign turned.
    """
    check_shape("overlong_penalty", "B", lengths=lengths)
    check_range("overlong_penalty", at_least=1, at_most=max_length, buffer=buffer)
    return (lengths.to(torch.float64) - (max_length - buffer)).clamp(0, buffer) / buffer


def last_token_mask(mask: Tensor) -> Tensor:
    """Return a mask of the last real token of each row; `mask` [B, T] bool must be True on a prefix of each row."""
    return mask & ~nn.functional.pad(mask, (0, 1))[:, 1:]
