"""Masks of float64 for transformers' own attention that stay finite in a softmax of float32.

Attention written out ("eager", of models that cap their scores or bias them, such as Gemma 2 and Bloom) adds the
smallest number of the weights' type to masked scores, and many a model computes its softmax in float32 whatever that
type is. Float64's smallest number is minus infinity there. A padding token sees nothing but padding, so its whole row
is minus infinity and becomes NaN, and in the next layer NaN as a key spoils every real token, masked or not. Float32's
smallest number is far enough below any score in both types.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def keep_masks_finite() -> None:
    """Have transformers build masks of float64 from float32's smallest number; in other types nothing changes.

    For all models of the process, and not on import, which would import all of transformers' models' basis.
    """
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register("eager", _finite_mask)


def _finite_mask(*, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor | None:
    """Return the mask `[B, 1, queries, keys]` that is added to scores; see transformers' `eager_mask`."""
    from transformers.masking_utils import eager_mask

    filled_with = torch.float32 if dtype == torch.float64 else dtype
    mask: Tensor | None = eager_mask(dtype=filled_with, **options)
    return None if mask is None else mask.to(dtype)
