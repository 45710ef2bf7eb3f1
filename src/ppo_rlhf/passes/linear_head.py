"""Statistics of a language-model head's logits, in chunks of positions, without keeping the logits.

The logits are a linear head's only large tensors: with a vocabulary of 262,144 one position's take 1 MiB. Two other
fused heads were looked at. torch's `F.linear_cross_entropy(options=...)` (2.13) has no temperature, no entropy and no
KL, and makes gradients in the forward pass. TRL's `add_fused_lm_head` (1.16) has temperature and entropy, but no KL; it
replaces the model's forward, and reads scales and caps of logits from names in configurations, where
`forward.logits_of` probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ppo_rlhf.passes.packed_attention import as_autocast

Statistics = Callable[..., tuple[Tensor, ...]]
"""From logits `[n, V]` and further tensors of n rows to statistics, `[n]` each. A statistic of a position depends on
that position's rows only."""
SLICES = 8
"""In how many slices of the vocabulary a 16-bit product is added to a float32 gradient, so that no product is whole."""


class LinearHead(torch.autograd.Function):
    """Statistics, `[R]` each, of the logits of states `[R, H]` under a weight `[V, H]`, `size` positions at a time.

    The backward pass computes the logits again, and adds each chunk's part to one gradient of the weight, in place. If
    the weight is frozen, the forward pass already computes each statistic's gradient with respect to its own states,
    while the logits are there: one product instead of two, for one statistic. A position whose incoming gradient is 0
    gets a gradient of exactly 0.

    `rows` are further arguments of `compute`, tensors of R rows; only states, weight and bias get gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Statistics, size: int, states: Tensor, weight: Tensor, bias: Tensor | None, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        device = states.device.type
        # The backward pass computes in the same dtypes; what autocast would cast in each chunk is cast once
        ctx.autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        cast, head = as_autocast(states), _Head.of(weight, bias)
        is_frozen = not any(ctx.needs_input_grad[3:5])
        chunks, slopes = [], []
        for part, *others in _chunks(size, cast, *rows):
            logits = head.logits(part)
            if is_frozen and ctx.needs_input_grad[2]:
                with torch.enable_grad():
                    found = compute(logits.requires_grad_(), *others)
                one = torch.ones_like(found[0])
                slopes.append([head.of_states(*torch.autograd.grad(each, logits, one)) for each in found])
                chunks.append([each.detach() for each in found])
                del found  # and with it what autograd keeps of the logits
            else:
                chunks.append([*compute(logits, *others)])
        ctx.compute, ctx.size, ctx.is_frozen, ctx.dtype = compute, size, is_frozen, states.dtype
        kept = [torch.cat(each) for each in zip(*slopes, strict=True)]
        ctx.save_for_backward(*(kept if is_frozen else (cast, weight, bias, *rows)))
        return tuple(torch.cat(each) for each in zip(*chunks, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        nothing = [None] * len(ctx.needs_input_grad[5:])
        if ctx.is_frozen:
            scaled = (_scaled(slopes, grad) for slopes, grad in zip(ctx.saved_tensors, grads, strict=True))
            return None, None, torch.stack([*scaled]).sum(0).to(ctx.dtype), None, None, *nothing
        cast, weight, bias, *rows = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        of_weight, of_bias = (
            torch.zeros_like(each) if needed else None for each, needed in ((weight, needs_weight), (bias, needs_bias))
        )
        of_states = []
        with ctx.autocast:
            head = _Head.of(weight, bias)
            for number, (part, *others) in enumerate(_chunks(ctx.size, cast, *rows)):
                logits = head.logits(part)
                with torch.enable_grad():
                    found = ctx.compute(logits.requires_grad_(), *others)
                incoming = [grad[number * ctx.size :][: len(part)] for grad in grads]
                (slopes,) = torch.autograd.grad(found, logits, incoming)
                del found
                if needs_states:
                    of_states.append(head.of_states(slopes))
                if of_weight is not None:
                    _add_product(of_weight, slopes, part)
                if of_bias is not None:
                    of_bias += slopes.sum(0)
        return None, None, torch.cat(of_states).to(ctx.dtype) if needs_states else None, of_weight, of_bias, *nothing


class _Head(NamedTuple):
    """A head's weight `[V, H]` and bias `[V]`, in autocast's dtype."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> _Head:
        return cls(as_autocast(weight), None if bias is None else as_autocast(bias))

    def logits(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)

    def of_states(self, slopes: Tensor) -> Tensor:
        """Return the gradient `[n, H]` with respect to the states, from the gradient `[n, V]` of the logits."""
        return slopes @ self.weight


def _chunks(size: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(each.split(size) for each in rows), strict=True)


def _scaled(slopes: Tensor, grad: Tensor) -> Tensor:
    return torch.where(grad[:, None] == 0, 0.0, slopes * grad[:, None])


def _add_product(total: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Add slopes^T states `[V, H]` to `total`, in place; a 16-bit product is made and added in slices."""
    if slopes.dtype == total.dtype:
        total.addmm_(slopes.T, states)
        return
    for part, columns in zip(total.chunk(SLICES), slopes.chunk(SLICES, dim=1), strict=True):
        part += columns.T @ states
