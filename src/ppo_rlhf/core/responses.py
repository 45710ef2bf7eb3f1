"""Finds the end of sampled responses, and makes masks from lengths, never by comparing token ids with a pad id."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_rlhf.core.checks import check_shape
from ppo_rlhf.core.errors import ShapeError


def response_lengths(response_ids: Tensor, stop_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Measure each response of `response_ids` [B, T] up to and including its first stop token.

    Tokens after the first stop token are ignored. Raises ShapeError if `response_ids` is not [B, T].

    Returns:
        `lengths` [B] int64, in tokens, including the stop token; T for a response without a stop token.
        `terminated` [B] bool: True if the response has a stop token, False if it was cut off at T.
    """
    check_shape("response_lengths", "BT", response_ids=response_ids)
    stop_ids = torch.tensor(list(stop_token_ids), dtype=response_ids.dtype, device=response_ids.device)
    is_stop_BT = torch.isin(response_ids, stop_ids)
    before_stop_B = (is_stop_BT.cumsum(dim=1) == 0).sum(dim=1)
    terminated_B = is_stop_BT.any(dim=1)
    return before_stop_B + terminated_B, terminated_B


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a bool mask [B, width] that is True on the first `lengths[b]` columns of row b; `lengths` is [B] integers.

    Raises ShapeError if `lengths` is not [B], or a length is outside 0..width.
    """
    check_shape("length_mask", "B", lengths=lengths)
    if len(lengths) and not bool(((lengths >= 0) & (lengths <= width)).all()):
        raise ShapeError(
            f"length_mask: lengths span {int(lengths.min())}..{int(lengths.max())}; they must be in 0..width={width}. "
            "Give the width of the tensor that the mask is for."
        )
    return torch.arange(width, device=lengths.device) < lengths[:, None]
