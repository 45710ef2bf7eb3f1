"""Episodes of several turns: the tokens that a policy wrote, taken together without what its environment answered."""

import torch
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_shape
from ppo_rlhf.core.responses import length_mask


def compact(values: Tensor, mask: Tensor) -> Tensor:
    """Move the values of the masked tokens to the front of each row, in their order; 0 after them.

    It closes the gaps, so GAE treats the policy's last token of a turn and its first token of the next one as
    consecutive steps: an environment's tokens are neither actions nor steps (as in verl's GAE).

    `values` [B, T] may be anything where `mask` [B, T], which may have holes, is False. The result is [B, T]: the kept
    tokens of row b are the first `mask[b].sum()` columns. Raises ShapeError if shapes do not fit.
    """
    check_shape("compact", "BT", values=values, mask=mask)
    kept_BT = as_bool(mask)
    compacted_BT = torch.zeros_like(values)
    compacted_BT[compact_mask(kept_BT)] = values[kept_BT]
    return compacted_BT


def compact_mask(mask: Tensor) -> Tensor:
    """Return where `compact` puts the kept tokens: [B, T] bool, True on a prefix of each row."""
    return length_mask(as_bool(mask).sum(dim=1), mask.shape[1])


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Undo `compact`: move the first values [B, T] of each row back to the True places of its mask [B, T]; 0 elsewhere.

    Columns of row b after the first `mask[b].sum()` are not looked at. Raises ShapeError if shapes do not fit.
    """
    check_shape("spread", "BT", values=values, mask=mask)
    kept_BT = as_bool(mask)
    spread_BT = torch.zeros_like(values)
    spread_BT[kept_BT] = values[compact_mask(kept_BT)]
    return spread_BT
