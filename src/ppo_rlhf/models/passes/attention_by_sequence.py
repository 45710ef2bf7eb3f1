"""Causal attention of one sequence after the other where they lie in a row, on a CPU: nothing is spread or padded.

By torch's own fused kernel, as `scaled_dot_product_attention` would, but called by name: autograd's views of each
sequence, joined again, would take as long as the attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

FEWEST_PAIRS = 2**14
"""Pairs of positions in all heads that a call of the kernel has to spare to be worth its time (some 15 microseconds,
50 with the backward pass). Of a row of 8 sequences of 60 tokens, 8 heads, it spares 44,000 a call and takes 0.6 of the
time; of 30 tokens, 4 heads, 5,000 and 1.1."""


class Run(NamedTuple):
    """Neighbouring sequences of one length, which are computed together."""

    start: int  # the first one's first token
    sequences: int
    length: int

    def heads_first(self, rows_NHD: Tensor) -> Tensor:
        """Return a view `[sequences, H, length, d]` of their part of a row of tokens."""
        part = rows_NHD[self.start : self.start + self.sequences * self.length]
        return part.unflatten(0, (self.sequences, self.length)).transpose(1, 2)


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs among sequences of these lengths, each at least 1, one behind the other."""
    runs, start = [], 0
    for length, equal in groupby(lengths):
        run = Run(start, len(list(equal)), length)
        runs.append(run)
        start += run.sequences * length
    return tuple(runs)


def spares_enough(runs: Sequence[Run], width: int, heads: int) -> bool:
    """Whether this is faster than attention in sequences that are all padded to a width."""
    spared = heads * sum(run.sequences * (width**2 - run.length**2) for run in runs)
    return spared >= FEWEST_PAIRS * len(runs)


def has_fused_kernel(query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor) -> bool:
    """Whether torch would take its fused kernel for them on the CPU, where they are."""
    query, key, value = (x[None].transpose(1, 2) for x in (query_NHD, key_NHD, value_NHD))
    choice: int = torch._fused_sdp_choice(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=True)
    return choice == SDPBackend.FLASH_ATTENTION.value


def attend_by_sequence(
    query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, *, runs: Sequence[Run], scaling: float | None
) -> Tensor:
    """Return `[N, H, d]`: what each token takes from its own sequence up to itself, 0 behind the last run.

    Args:
        query_NHD: Of N tokens, in H heads; `has_fused_kernel` is true for it, key and value.
        key_NHD: Likewise, in as many heads.
        value_NHD: Likewise.
        runs: Of the sequences that lie in the row, from token 0 on.
        scaling: Of the scores; None: 1 / sqrt(d).
    """
    attended: Tensor = _BySequence.apply(query_NHD, key_NHD, value_NHD, runs, scaling)
    return attended


class _BySequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scaling: float | None
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        attended, normalisers = _empty_for(query, runs), []
        for run in runs:
            part, normaliser = attend(*map(run.heads_first, (query, key, value)), 0.0, True, scale=scaling)
            run.heads_first(attended).copy_(part)
            normalisers.append(normaliser)
        ctx.runs, ctx.scaling = runs, scaling
        ctx.save_for_backward(query, key, value, attended, *normalisers)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        saved = ctx.saved_tensors  # asked for once: a second time is an error where the pass was computed once more
        *given, attended = saved[:4]
        gradients = tuple(_empty_for(x, ctx.runs) for x in given)
        for run, normaliser in zip(ctx.runs, saved[4:], strict=True):
            parts = map(run.heads_first, (grad_outputs[0], *given, attended))
            found = differentiate(*parts, normaliser, 0.0, True, scale=ctx.scaling)
            for whole, part in zip(gradients, found, strict=True):
                run.heads_first(whole).copy_(part)
        return *gradients, None, None


def _empty_for(rows: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return memory for what the runs do not leave out, and 0 behind them."""
    empty = torch.empty_like(rows, memory_format=torch.contiguous_format)
    last = runs[-1]
    empty[last.start + last.sequences * last.length :] = 0.0
    return empty
