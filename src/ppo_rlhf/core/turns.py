"""Episodes of several turns: the tokens that a policy wrote, taken together without what its environment answered."""

import torch
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_dimensions, check_same_shape
from ppo_rlhf.core.responses import length_mask


def compact(values: Tensor, mask: Tensor) -> Tensor:
    """Move the values of the masked tokens to the front of each row, in their order; 0 after them.

    It closes the gaps, so GAE treats the policy's last token of a turn and its first token of the next one as
    consecutive steps: an environment's tokens are neither actions nor steps (as in verl's GAE).

    Args:
        values: [B, T]; anything where the mask is False.
        mask: [B, T], True on the tokens to keep; holes are fine.

    Returns:
        [B, T]; the kept tokens of row b are the first `mask[b].sum()` columns.

    Raises:
        ShapeError: shapes do not fit.
    """
    kept_BT = _checked("compact", values, mask)
    compacted_BT = torch.zeros_like(values)
    compacted_BT[compact_mask(kept_BT)] = values[kept_BT]
    return compacted_BT


def compact_mask(mask: Tensor) -> Tensor:
    """Return where `compact` puts the kept tokens: [B, T] bool, True on a prefix of each row."""
    return length_mask(as_bool(mask).sum(dim=1), mask.shape[1])


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Undo `compact`: move the first values of each row back to its masked tokens; 0 elsewhere.

    Args:
        values: [B, T]; columns of row b after the first `mask[b].sum()` are not looked at.
        mask: [B, T], the mask that `compact` was given.

    Returns:
        [B, T], 0 where the mask is False.

    Raises:
        ShapeError: shapes do not fit.
    """
    kept_BT = _checked("spread", values, mask)
    spread_BT = torch.zeros_like(values)
    spread_BT[kept_BT] = values[compact_mask(kept_BT)]
    return spread_BT


def _checked(where: str, values: Tensor, mask: Tensor) -> Tensor:
    check_dimensions(where, "BT", values=values)
    check_same_shape(where, values=values, mask=mask)
    return as_bool(mask)
