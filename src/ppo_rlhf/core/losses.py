"""Computes the losses of PPO, and the policy loss of SAO, which masks tokens where PPO clips ratios.

Only real tokens count; padding may hold anything. Half precision is widened to float32.

Tensors are [B, T]. `mask` is True on the tokens that count; holes and empty rows are allowed. `loss_aggregation` and
`denominator` are arguments of `aggregate_loss`; `denominator` is the optimiser step's count of tokens or sequences over
all ranks, or None for the count of the given tensors. Each loss function raises ShapeError if shapes do not fit, and
ConfigError if an option is out of range.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_rlhf.core.aggregation import aggregate_loss
from ppo_rlhf.core.checks import as_bool, check_range, check_shape, compute_dtype, select
from ppo_rlhf.core.kl import LOG_RATIO_LIMIT
from ppo_rlhf.core.option_names import LossAggregation
from ppo_rlhf.core.statistics import masked_mean


class PolicyLoss(NamedTuple):
    """The policy loss and its statistics: `loss` has a gradient; all other fields are detached means over real tokens.

    To average `clipfrac`, `approxkl` or `ratio` over micro-batches, weight each micro-batch by its real tokens.
    """

    loss: Tensor
    # Clip fraction: share of tokens whose clipped policy loss exceeds the unclipped loss, plus masked tokens
    clipfrac: Tensor
    approxkl: Tensor  # ½ · mean((new logprob − old logprob)²), nats per token
    ratio: Tensor  # mean over tokens of the (clamped) probability ratio


class ValueLoss(NamedTuple):
    """The value loss and its clip fraction: `loss` has a gradient; `clipfrac` is a detached mean over real tokens."""

    loss: Tensor
    clipfrac: Tensor  # clip fraction: share of tokens whose clipped value error exceeds the unclipped error


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    loss_aggregation: LossAggregation = "token_mean",
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate loss, to be minimised.

    With ρ = exp(clamp(logp − old logp, ±20)), the loss of a token is max(−A ρ, −A clip(ρ, 1 − cliprange, 1 +
    cliprange_high)). If `dual_clip` is given, the loss of a token with A < 0 is at most −A · dual_clip. Every field of
    the result is 0 if no token counts.

    `old_logprobs` are the log-probabilities before the update, from the same forward and under the same temperature.
    `cliprange` is > 0. `cliprange_high` ("clip higher") is > 0; None: the same as `cliprange`. `dual_clip` is > 1; None
    switches the dual clip off.

    Source: Schulman et al. (2017), "Proximal Policy Optimization Algorithms", eq. 7 with the sign turned; dual clip: Ye
    et al. (2020), "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", eq. 5.
    """
    where = "clipped_policy_loss"
    check_shape(where, "BT", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    high = cliprange if cliprange_high is None else cliprange_high
    check_range(where, above=0.0, cliprange=cliprange, cliprange_high=high)
    counts_BT = as_bool(mask)
    dtype = compute_dtype(logprobs, old_logprobs, advantages)

    log_ratio_BT = select(logprobs.to(dtype) - old_logprobs.to(dtype), counts_BT, dtype)
    ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantages_BT = select(advantages, counts_BT, dtype)
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1.0 - cliprange, 1.0 + high)
    is_clipped_BT = clipped_BT > unclipped_BT
    # Call torch.where instead of torch.maximum, whose backward pass has more operations
    token_loss_BT = torch.where(is_clipped_BT, clipped_BT, unclipped_BT)
    if dual_clip is not None:
        check_range(where, above=1.0, dual_clip=dual_clip)
        bounded_BT = torch.minimum(token_loss_BT, -advantages_BT * dual_clip)
        token_loss_BT = torch.where(advantages_BT < 0, bounded_BT, token_loss_BT)

    loss = aggregate_loss(token_loss_BT, counts_BT, loss_aggregation, denominator)
    return PolicyLoss(loss, *_token_means(is_clipped_BT, log_ratio_BT, ratio_BT, counts_BT))


def masked_policy_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    loss_aggregation: LossAggregation = "token_mean",
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Compute SAO's importance-weighted surrogate loss, which masks tokens with an extreme ratio, to be minimised.

    With ρ = exp(clamp(logp − sampler logp, ±20)), the loss of a token is −A ρ if low < ρ < high. The gradient of −A ρ
    is −A ρ ∇logp, which is also the gradient of −sg(ρ) A logp. The loss of any other token is 0, without a gradient,
    but the token still counts in the divisor of `aggregate_loss`.

    The tokens were drawn under `sampler_logprobs`. Log-probabilities of the trained forward before the update are not
    needed. In the result, `clipfrac` is the share of masked tokens, and `approxkl` and `ratio` compare the policy with
    the sampler. `low` is in [0, 1), and `high` is > 1.

    Source: Hou et al. (2026), "Single-Rollout Asynchronous Optimization for Agentic Reinforcement Learning",
    arXiv:2607.07508, eq. 1 to 3 (direct double-sided importance sampling).
    """
    where = "masked_policy_loss"
    check_shape(where, "BT", logprobs=logprobs, sampler_logprobs=sampler_logprobs, advantages=advantages, mask=mask)
    check_range(where, at_least=0.0, below=1.0, low=low)
    check_range(where, above=1.0, high=high)
    counts_BT = as_bool(mask)
    dtype = compute_dtype(logprobs, sampler_logprobs, advantages)

    log_ratio_BT = select(logprobs.to(dtype) - sampler_logprobs.to(dtype), counts_BT, dtype)
    ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    is_masked_BT = (ratio_BT <= low) | (ratio_BT >= high)
    token_loss_BT = torch.where(is_masked_BT, 0.0, -select(advantages, counts_BT, dtype) * ratio_BT)

    loss = aggregate_loss(token_loss_BT, counts_BT, loss_aggregation, denominator)
    return PolicyLoss(loss, *_token_means(is_masked_BT, log_ratio_BT, ratio_BT, counts_BT))


def _token_means(is_cut_BT: Tensor, log_ratio_BT: Tensor, ratio_BT: Tensor, counts_BT: Tensor) -> tuple[Tensor, ...]:
    """Return the detached clipfrac, approxkl and ratio of a `PolicyLoss`."""
    dtype = ratio_BT.dtype
    with torch.no_grad():
        measures = torch.stack([is_cut_BT.to(dtype), 0.5 * log_ratio_BT.square(), ratio_BT])
        sums = select(measures, counts_BT, dtype).sum(dim=(1, 2))
        return (sums / counts_BT.sum().clamp(min=1)).unbind()


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    cliprange_value: float | None = 0.2,
    loss_aggregation: LossAggregation = "token_mean",
    denominator: Tensor | float | None = None,
) -> ValueLoss:
    """Compute the critic's clipped squared error, per token ½ max((V − R)², (clip(V, V_old ± cliprange_value) − R)²).

    V are the `values`, V_old the `old_values` (before the update), R the `returns`. `cliprange_value` is in value
    units, > 0; None: the plain squared error without clipping. The caller multiplies the loss by `vf_coef`.

    Source: value clipping as in OpenAI baselines' ppo2; the ½ inside the loss as in TRL, OpenRLHF and verl.
    """
    where = "clipped_value_loss"
    check_shape(where, "BT", values=values, old_values=old_values, returns=returns, mask=mask)
    counts_BT = as_bool(mask)
    dtype = compute_dtype(values, old_values, returns)

    values_BT = select(values, counts_BT, dtype)
    returns_BT = select(returns, counts_BT, dtype)
    error_BT = (values_BT - returns_BT).square()
    if cliprange_value is None:
        clipped_error_BT = error_BT
    else:
        check_range(where, above=0.0, cliprange_value=cliprange_value)
        old_values_BT = select(old_values, counts_BT, dtype)
        clipped_values_BT = values_BT.clamp(old_values_BT - cliprange_value, old_values_BT + cliprange_value)
        clipped_error_BT = (clipped_values_BT - returns_BT).square()
    # Do not call torch.maximum: how it splits the gradient between equal errors depends on torch's version
    is_clipped_BT = clipped_error_BT > error_BT
    greater_BT = torch.where(is_clipped_BT, clipped_error_BT, error_BT)
    loss = 0.5 * aggregate_loss(greater_BT, counts_BT, loss_aggregation, denominator)
    with torch.no_grad():
        return ValueLoss(loss=loss, clipfrac=masked_mean(is_clipped_BT.to(dtype), counts_BT))
