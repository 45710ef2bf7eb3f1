"""Weights in the order in which oneDNN's kernels read them, while responses are sampled on a CPU.

A decoding step has few rows, so it takes as long as reading the weights does. MKL and oneDNN read parameters as they
lie at a third of the memory's speed; in blocks of a kernel's size (`_reorder_linear_weight`), at nearly all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.forwards import Forward, forwards_replaced
from ppo_rlhf.models.products.compiled_shapes import fills_rows
from ppo_rlhf.models.products.linear import (
    FEWEST_WEIGHTS,
    has_fast_products,
    is_faster_packed,
    is_plain_linear,
    times_transposed,
)
from ppo_rlhf.models.products.processors import lacks_fast_instructions
from ppo_rlhf.models.products.sixteen_bit_weights import layers_that_autocast


@contextmanager
def packed_weights(model: PreTrainedModel) -> Iterator[bool]:
    """Within the block a model's linear layers read packed copies of what their weights are now.

    Yields whether each new number of rows of a decoding step takes time and memory: where oneDNN computes on a CPU.

    In float32, or in the 16 bits that autocast computes in; as float32 without fast instructions for these
    (`models.products.rounded`). The copies take as much memory as gradients do, which are not there at that time; so
    weights without a gradient (those below LoRA's adapters, say) are left as they are. Nothing flows back through the
    layers.
    """
    packed: dict[tuple[int, bool], Tensor] = {}
    forwards: list[tuple[nn.Module, Forward]] = []
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    held = torch.float32 if lacks_fast_instructions(dtype) else dtype
    with torch.no_grad():
        for layer in _layers(model, dtype):
            if _key(layer) not in packed:
                packed[_key(layer)] = _pack(layer, dtype, held)
            bias = None if layer.bias is None else layer.bias.to(dtype).to(held)
            forwards.append((layer, partial(_product, packed[_key(layer)], bias, dtype)))
    with forwards_replaced(forwards):
        yield fills_rows(model) or (model.device.type == "cpu" and (bool(forwards) or has_fast_products(model)))


def packed_sizes(model: PreTrainedModel, dtype: torch.dtype) -> list[int]:
    """Return the bytes of each copy that products in this type need, if copies are float32's; data is not needed."""
    return [4 * numel for numel in {_key(layer): layer.weight.numel() for layer in _layers(model, dtype)}.values()]


def _layers(model: PreTrainedModel, dtype: torch.dtype) -> list[nn.Linear | Conv1D]:
    """Return the layers whose products, in float32 or by autocast in 16 bits, packed weights make faster."""
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return []
    layers: list[nn.Linear | Conv1D] = []
    if dtype == torch.float32:
        layers = [module for module in model.modules() if is_plain_linear(module)] if is_faster_packed() else []
    elif dtype == torch.bfloat16 or lacks_fast_instructions(dtype):
        layers = layers_that_autocast(model, dtype)
    return [
        layer
        for layer in layers
        if layer.weight.is_cpu
        and layer.weight.dtype == torch.float32
        and layer.weight.requires_grad
        and layer.weight.numel() >= FEWEST_WEIGHTS
        and "forward" not in layer.__dict__  # somebody's own, an offloading hook's say
    ]


def _key(layer: nn.Linear | Conv1D) -> tuple[int, bool]:
    """Return what layers have in common that read one copy: the weight, and which of its sides is out."""
    return id(layer.weight), isinstance(layer, Conv1D)


def _pack(layer: nn.Linear | Conv1D, dtype: torch.dtype, held: torch.dtype) -> Tensor:
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).to(held))
    return packed


def _product(packed: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Return `[…, out]` of `[…, in]`, both rounded to a type."""
    return times_transposed(rows.to(dtype).to(packed.dtype), packed, bias).to(dtype)
