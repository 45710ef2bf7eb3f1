"""Reduces token losses to one number whose sum does not depend on how a minibatch is cut into micro-batches."""

from typing import assert_never

import torch
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_choice, check_range, check_shape, compute_dtype, select
from ppo_rlhf.core.option_names import LOSS_AGGREGATIONS, LossAggregation


def aggregate_loss(
    token_loss: Tensor,
    mask: Tensor,
    loss_aggregation: LossAggregation = "token_mean",
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Reduce token losses to one scalar: numerator / denominator.

    | loss_aggregation | numerator | denominator |
    | --- | --- | --- |
    | token_mean | sum over real tokens | real tokens |
    | seq_mean_token_sum | sum over real tokens | sequences |
    | seq_mean_token_mean | sum over sequences of their token mean | sequences |
    | token_sum_fixed_length | sum over real tokens | sequences × fixed length |

    A sequence is a row with at least one real token. If all micro-batches of a minibatch get the same `denominator`,
    the micro-batches' losses add up to the loss of the whole minibatch, and the micro-batches' gradients add up to the
    minibatch's gradient.

    Args:
        token_loss: [B, T]; padding may hold anything.
        mask: [B, T], True on the tokens that count; holes and empty rows are allowed.
        loss_aggregation: One of LOSS_AGGREGATIONS.
        denominator: The optimiser step's global count: `aggregation_count` of the whole minibatch, summed over ranks.
            None: the token or sequence count of this call, with this call's width T as the fixed length.

    The result is 0, with gradient 0, if `mask` is all False. Raises ShapeError if shapes do not fit, and ConfigError
    for an unknown aggregation, or a `denominator` that is a negative or non-finite number (the value of a tensor is not
    checked).
    """
    where = "aggregate_loss"
    check_shape(where, "BT", token_loss=token_loss, mask=mask)
    check_choice(where, LOSS_AGGREGATIONS, loss_aggregation=loss_aggregation)
    counts_BT = as_bool(mask)
    dtype = compute_dtype(token_loss)
    losses_BT = select(token_loss, counts_BT, dtype)
    match loss_aggregation:
        case "seq_mean_token_mean":
            numerator = (losses_BT.sum(dim=1) / counts_BT.sum(dim=1).clamp(min=1)).sum()
        case "token_mean" | "seq_mean_token_sum" | "token_sum_fixed_length":
            numerator = losses_BT.sum()
        case unknown:
            assert_never(unknown)

    if denominator is None:
        denominator = aggregation_count(counts_BT, loss_aggregation)
    elif not isinstance(denominator, Tensor):
        check_range(where, at_least=0.0, denominator=denominator)
        return numerator / (denominator or 1.0)
    divisor = torch.as_tensor(denominator, dtype=dtype, device=token_loss.device)
    # If the mask selects no token, numerator and divisor may both be 0: divide by 1, so that the result is 0, not NaN.
    return numerator / torch.where(counts_BT.any(), divisor, 1.0)


def aggregation_count(mask: Tensor, loss_aggregation: LossAggregation, *, fixed_length: int | None = None) -> Tensor:
    """Count the tokens or sequences by which `aggregate_loss` divides, as an int64 scalar.

    `mask` [B, T] is the mask of the whole minibatch; if each rank has a shard of the minibatch, the caller sums the
    counts over all ranks. `fixed_length`, >= 1, is the number of token slots of a response (response_length), which
    only token_sum_fixed_length uses; None: T.

    Raises ShapeError if `mask` is not [B, T], and ConfigError for an unknown aggregation or `fixed_length` below 1.
    """
    check_shape("aggregation_count", "BT", mask=mask)
    check_choice("aggregation_count", LOSS_AGGREGATIONS, loss_aggregation=loss_aggregation)
    counts_BT = as_bool(mask)
    match loss_aggregation:
        case "token_mean":
            return counts_BT.sum()
        case "seq_mean_token_sum" | "seq_mean_token_mean":
            return counts_BT.any(dim=1).sum()
        case "token_sum_fixed_length":
            if fixed_length is not None:
                check_range("aggregation_count", at_least=1, fixed_length=fixed_length)
            return counts_BT.any(dim=1).sum() * (mask.shape[1] if fixed_length is None else fixed_length)
        case unknown:
            assert_never(unknown)
