"""Attention worked out token by token, and rows of tokens to ask it of."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_rlhf.models.packed_attention import PackedLayout


def worked_out(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float) -> Tensor:
    """Return the attention of `[N, H, d]` to `[N, K, d]`, one token and one head after the other."""
    groups = query.shape[1] // key.shape[1]
    rows, start = [], 0
    for length in lengths:
        for i in range(start, start + length):
            heads = []
            for head in range(query.shape[1]):
                seen = slice(start, i + 1)
                weights = torch.softmax(key[seen, head // groups] @ query[i, head] * scaling, -1)
                heads.append(weights @ value[seen, head // groups])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def inputs(layout: PackedLayout, heads: tuple[int, ...], dtype: torch.dtype, value_width: int = 8) -> list[Tensor]:
    """Return rows of query, key, value and result, `[N + more, heads, d]`; what fills them up is NaN."""
    generator = torch.Generator().manual_seed(1)
    tokens = len(layout.slots) + layout.more
    widths = (8, 8, value_width, value_width)
    rows = [torch.randn(tokens, n, d, generator=generator).to(dtype) for n, d in zip(heads, widths, strict=False)]
    for x in rows:
        x[len(layout.slots) :] = torch.nan
    return rows
