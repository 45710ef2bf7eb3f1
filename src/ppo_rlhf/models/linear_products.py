"""Products of linear layers in float32 by oneDNN, on processors of AMD that have AVX-512.

Torch asks MKL for them, which keeps to AVX2 on other makers' processors: half of the speed or less where AVX-512 is 512
bits wide (EPYC of the fifth generation: 220 in place of 97 GFLOP/s on one core). The sums are in another order, and as
exact. Layers of other types, small ones and single rows are left to torch, as is whatever is not float32.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

FEWEST_WEIGHTS = 2**16
"""Of a layer. With fewer, the time that a call takes outweighs the product: 14 against 5 microseconds (64 x 256)."""


def use_fast_products(model: nn.Module) -> None:
    """Let a model's linear layers compute their products in float32 by oneDNN, if that is faster here.

    A layer only changes its class: names, parameters, copies and what is saved stay as they are.
    """
    if not is_faster():
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
    return torch._C._get_mkldnn_enabled() and any(
        isinstance(module, FastLinear | FastConv1D)
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= FEWEST_WEIGHTS
        for module in model.modules()
    )


@cache
def is_faster() -> bool:
    """Whether this processor is one of AMD's with AVX-512, and torch has both libraries."""
    return _is_amd_with("AVX512")


@cache
def is_faster_packed() -> bool:
    """Whether products of few rows are faster by oneDNN with weights in its own order: on AMD's with AVX2, too."""
    return _is_amd_with("AVX512", "AVX2")


def _is_amd_with(*capabilities: str) -> bool:
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return libraries and torch.backends.cpu.get_cpu_capability() in capabilities and _vendor() == "AuthenticAMD"


def _vendor() -> str:
    """Return the maker's name that the processor gives, empty where Linux does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


class FastLinear(nn.Linear):
    """`nn.Linear`, weight `[out, in]`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `[…, out]` of `[…, in]`."""
        if not _suits(input, self.weight):
            return super().forward(input)
        return _linear(input, self.weight, self.bias)


class FastConv1D(Conv1D):
    """GPT-2's linear layer, weight `[in, out]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[…, out]` of `[…, in]`."""
        if not _suits(x, self.weight):
            plain: Tensor = super().forward(x)
            return plain
        return _linear(x, self.weight.t(), self.bias)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def _suits(rows: Tensor, weight: Tensor) -> bool:
    return (
        rows.dtype == weight.dtype == torch.float32
        and rows.is_cpu
        and weight.numel() >= FEWEST_WEIGHTS
        and rows.numel() > rows.shape[-1]  # a single row is no product of matrices
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._get_mkldnn_enabled()
    )


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    product: Tensor = _Linear.apply(flat, weight, bias)
    return product.view(*rows.shape[:-1], len(weight))


def times_transposed(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[m, n]` = left `[m, k]` right^T `[k, n]` + bias `[n]`, whatever the strides are.

    Right may also be in oneDNN's own order (`models.packed_weights`).
    """
    # Looked up with each call: where torch has no oneDNN, it does not have the operator either.
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """Rows `[m, k]`, weight `[n, k]` and bias `[n]` to `[m, n]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return times_transposed(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (rows, weight) = grad_outputs, ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        return (
            times_transposed(gradient, weight.t()) if for_rows else None,
            _weights_gradient(gradient, rows, weight) if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


def _weights_gradient(gradient: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return `[n, k]`, in memory as the weight is: the parameter of a `Conv1D` is its transpose."""
    if weight.is_contiguous():
        return times_transposed(gradient.t(), rows.t())
    return times_transposed(rows.t(), gradient.t()).t()
