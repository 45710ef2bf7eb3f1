"""Multi-turn episodes: join the tokens that the policy wrote, without the environment's tokens between them."""

import torch
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_shape
from ppo_rlhf.core.responses import length_mask


def compact(values: Tensor, mask: Tensor) -> Tensor:
    """Move the values where `mask` is True to the front of each row, in their order, and fill the rest with 0.

    On the moved values GAE treats the policy's last token of a turn and the first token of the policy's next turn as
    consecutive steps. An environment's tokens are neither actions nor steps (as in verl's GAE).

    `mask` [B, T] may have holes. `values` [B, T] may hold anything where `mask` is False. The result is [B, T]; the
    kept tokens of row b fill the first `mask[b].sum()` columns. Raises ShapeError if shapes do not fit.
    """
    check_shape("compact", "BT", values=values, mask=mask)
    kept_BT = as_bool(mask)
    compacted_BT = torch.zeros_like(values)
    compacted_BT[compact_mask(kept_BT)] = values[kept_BT]
    return compacted_BT


def compact_mask(mask: Tensor) -> Tensor:
    """Return the mask of the values that `compact` has moved: [B, T] bool, True on a prefix of each row."""
    return length_mask(as_bool(mask).sum(dim=1), mask.shape[1])


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Undo `compact`: move the first values of each row back to the positions where `mask` is True; 0 elsewhere.

    `values` and `mask` are [B, T]. In row b only the first `mask[b].sum()` columns of `values` are read. Raises
    ShapeError if shapes do not fit.
    """
    check_shape("spread", "BT", values=values, mask=mask)
    kept_BT = as_bool(mask)
    spread_BT = torch.zeros_like(values)
    spread_BT[kept_BT] = values[compact_mask(kept_BT)]
    return spread_BT
