"""Products of linear layers on processors that torch has no fast ones for.

In float32 by oneDNN on AMD's that have AVX-512: torch asks MKL, which keeps to AVX2 on other makers' processors, half
of the speed or less where AVX-512 is 512 bits wide (EPYC of the fifth generation: 220 in place of 97 GFLOP/s on one
core). The sums are in another order, and as exact.

In 16 bits as `models.products.rounded` does on those without fast instructions for them.

Layers of other types and single rows are left to torch, and in float32 small layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.products.processors import SIXTEEN_BITS, is_amd_with, lacks_fast_instructions
from ppo_rlhf.models.products.rounded import rounded_times_transposed, rounded_type

FEWEST_WEIGHTS = 2**16
"""Of a layer. With fewer, the time that a call takes outweighs the product: 14 against 5 microseconds (64 x 256)."""


def use_fast_products(model: nn.Module) -> None:
    """Let a model's linear layers compute their products as is fastest here.

    A layer only changes its class: names, parameters, copies and what is saved stay as they are.
    """
    if not is_faster() and not any(lacks_fast_instructions(dtype) for dtype in SIXTEEN_BITS):
        return
    for module in model.modules():
        kind = _KINDS.get(type(module))
        if kind is not None:
            module.__class__ = kind


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether y = W x + b is all that a layer computes; other subclasses may quantise W, say."""
    return type(module) in (*_KINDS, *_KINDS.values())


def has_fast_products(model: nn.Module) -> bool:
    """Whether oneDNN computes some of a model's products in float32."""
    return (
        is_faster()
        and torch._C._get_mkldnn_enabled()
        and any(
            isinstance(module, FastLinear | FastConv1D)
            and module.weight.dtype == torch.float32
            and module.weight.numel() >= FEWEST_WEIGHTS
            for module in model.modules()
        )
    )


@cache
def is_faster() -> bool:
    """Whether oneDNN's products in float32 are: on AMD's processors with AVX-512, where torch has both libraries."""
    return _has_both() and is_amd_with("AVX512")


@cache
def is_faster_packed() -> bool:
    """Whether products of few rows are faster by oneDNN with weights in its own order: on AMD's with AVX2, too."""
    return _has_both() and is_amd_with("AVX512", "AVX2")


def _has_both() -> bool:
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


class FastLinear(nn.Linear):
    """`nn.Linear`, weight `[out, in]`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `[…, out]` of `[…, in]`."""
        product = _fast_product(input, self.weight, self.bias)
        return super().forward(input) if product is None else product


class FastConv1D(Conv1D):
    """GPT-2's linear layer, weight `[in, out]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[…, out]` of `[…, in]`."""
        product: Tensor | None = _fast_product(x, self.weight.t(), self.bias)
        if product is None:
            product = super().forward(x)
        return product


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def _fast_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return `[…, out]` of rows `[…, in]` and weight `[out, in]`; None where torch's own product is as fast."""
    if torch.compiler.is_compiling() or not rows.is_cpu or rows.numel() <= rows.shape[-1]:
        return None  # a single row is no product of matrices
    rounded = rounded_type(rows, weight)
    if rounded is not None:
        return rounded_linear(rows, weight, bias, rounded)
    return _linear(rows, weight, bias, times_transposed) if _suits(rows, weight) else None


def _suits(rows: Tensor, weight: Tensor) -> bool:
    return (
        rows.dtype == weight.dtype == torch.float32
        and weight.numel() >= FEWEST_WEIGHTS
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_mkldnn_enabled()
        and is_faster()
    )


def rounded_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `[…, out]` in a 16-bit type of rows `[…, in]`, weight `[out, in]` and bias, all rounded to it."""
    rounded_bias = None if bias is None else bias.to(dtype)
    return _linear(rows.to(dtype), weight.to(dtype), rounded_bias, rounded_times_transposed)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Gives left `[m, k]` right^T `[k, n]` + bias `[n]`."""


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, times: Product) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    product: Tensor = _Linear.apply(flat, weight, bias, times)
    return product.view(*rows.shape[:-1], len(weight))


def times_transposed(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[…, n]` = left `[…, k]` right^T `[k, n]` + bias `[n]`, whatever the strides are.

    Right may also be in oneDNN's own order (`models.products.packed_weights`).
    """
    # Looked up with each call: where torch has no oneDNN, it does not have the operator either.
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """Rows `[m, k]`, weight `[n, k]` and bias `[n]` to `[m, n]`, by a product of one's choice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, times: Product) -> Tensor:
        for_rows, for_weight, *_ = ctx.needs_input_grad
        ctx.times, ctx.is_transposed = times, weight.stride(0) < weight.stride(1)
        ctx.save_for_backward(rows if for_weight else None, weight if for_rows else None)
        return times(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (rows, weight) = grad_outputs, ctx.saved_tensors
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        of_weight = None
        if for_weight:  # in memory as the weight is: the parameter of a `Conv1D` is its transpose
            left, right = (rows.t(), gradient.t()) if ctx.is_transposed else (gradient.t(), rows.t())
            of_weight = ctx.times(left, right, None)
            of_weight = of_weight.t() if ctx.is_transposed else of_weight
        return (
            ctx.times(gradient, weight.t(), None) if for_rows else None,
            of_weight,
            gradient.sum(0) if for_bias else None,
            None,
        )
