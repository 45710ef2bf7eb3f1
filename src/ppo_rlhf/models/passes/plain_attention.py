"""Attention in products and a softmax of 16 bits, for a CPU: torch's fused kernel takes several times as long there.

Queries, keys and values go from a row of tokens `[N, heads, d]` to `[heads, B * L, d]`, and the result back, in one
copy each: what spreading them to padded sequences and bringing their heads to the front would do in three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainAttention:
    """Causal attention within each of B sequences of up to L tokens, which lie one behind the other in a row of N.

    Attributes:
        tokens: `[B * L]` long, which token of the row stands at each place; in the padding the sequence's last one
            again: it is finite, and as no token looks to its right, none sees it.
        slots: `[N]` long, place of each token.
        padding: `[B * L - N]` long, the other places.
        causal_bias: `[L, L]` bfloat16, added to scores: 0 up to the token itself, minus infinity to its right.
    """

    tokens: Tensor
    slots: Tensor
    padding: Tensor
    causal_bias: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, slots: Tensor) -> PlainAttention:
        """Return the attention among sequences of these lengths, padded to a width L."""
        sizes = torch.tensor(lengths)[:, None]
        tokens = (torch.minimum(torch.arange(width), sizes - 1) + sizes.cumsum(0) - sizes).flatten()
        ends = [torch.arange(row * width + length, (row + 1) * width) for row, length in enumerate(lengths)]
        hidden = torch.ones(width, width, dtype=torch.bool).triu(1)
        bias = torch.zeros(width, width, dtype=torch.bfloat16).masked_fill(hidden, -torch.inf)
        return cls(tokens, slots, torch.cat(ends), bias)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Return softmax(q k^T scaling + bias) v, `[N, H, d of v]`; see `packed_attention.Attention`.

        Tokens behind the N that have a place are of no sequence and get 0. Torch's softmax of 16 bits adds up in
        float32 within a row.
        """
        heads, width = query_NHD.shape[1:]
        factor = width**-0.5 if scaling is None else scaling
        query, key, value = self._heads_first(query_NHD, key_NKD, value_NKD)
        groups = heads // len(key)
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        query, key, value = (x.view(-1, len(self.causal_bias), x.shape[-1]) for x in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):  # it would hold scores and probabilities in float32
            bias = self.causal_bias.to(query.dtype)
            probabilities = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=factor).softmax(-1)
            attended = torch.bmm(probabilities, value).view(heads, -1, value.shape[-1])
        if self.is_even(len(query_NHD)):
            return attended.transpose(0, 1)
        result: Tensor = _TokensFirst.apply(attended, self, len(query_NHD))
        return result

    def is_even(self, size: int) -> bool:
        """Whether a row of this size has a token for each place, in order: all sequences are of one length."""
        return size == len(self.slots) == len(self.tokens)

    def _heads_first(self, *rows: Tensor) -> Sequence[Tensor]:
        if self.is_even(len(rows[0])):
            return [x.transpose(0, 1).contiguous() for x in rows]
        spread: Sequence[Tensor] = _HeadsFirst.apply(self, *rows)
        return spread


class _HeadsFirst(torch.autograd.Function):
    """From `[N + more, heads, d]` each to `[heads, B * L, d]`."""

    @staticmethod
    def forward(ctx: Any, places: PlainAttention, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.size = places, len(rows[0])
        return tuple(x.transpose(0, 1).index_select(1, places.tokens) for x in rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_tokens_first(gradient, ctx.places, ctx.size) for gradient in grad_outputs)


class _TokensFirst(torch.autograd.Function):
    """From `[heads, B * L, d]` to `[size, heads, d]`."""

    @staticmethod
    def forward(ctx: Any, spread: Tensor, places: PlainAttention, size: int) -> Tensor:
        ctx.places = places
        return _tokens_first(spread, places, size)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        places: PlainAttention = ctx.places  # gathering and clearing takes a third of the time of copying into zeros
        spread = grad_outputs[0].transpose(0, 1).index_select(1, places.tokens)
        return spread.index_fill_(1, places.padding, 0.0), None, None


def _tokens_first(spread: Tensor, places: PlainAttention, size: int) -> Tensor:
    """Return `[size, heads, d]`: each token's row, and 0 behind them."""
    rows = spread.new_empty(size, len(spread), spread.shape[2])
    n = len(places.slots)
    rows[:n] = spread.index_select(1, places.slots).transpose(0, 1)
    rows[n:] = 0.0
    return rows
