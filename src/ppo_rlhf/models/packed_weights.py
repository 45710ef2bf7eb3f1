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
from ppo_rlhf.models.compiled_shapes import fills_rows
from ppo_rlhf.models.forwards import Forward, forwards_replaced
from ppo_rlhf.models.linear_products import (
    FEWEST_WEIGHTS,
    has_fast_products,
    is_faster_packed,
    is_plain_linear,
    times_transposed,
)
from ppo_rlhf.models.sixteen_bit_weights import layers_that_autocast


@contextmanager
def packed_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within the block a model's linear layers read packed copies of what their weights are now.

    In float32, or in bfloat16 where that is what autocast computes in. The copies take as much memory as gradients
    do, which are not there at that time; so weights without a gradient (those below LoRA's adapters, say) are left as
    they are. Nothing flows back through the layers.
    """
    packed: dict[tuple[int, bool], Tensor] = {}
    forwards: list[tuple[nn.Module, Forward]] = []
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
    with torch.no_grad():
        for layer in _layers(model):
            if _key(layer) not in packed:
                packed[_key(layer)] = _pack(layer, dtype)
            bias = None if layer.bias is None else layer.bias.to(dtype)
            forwards.append((layer, partial(_product, packed[_key(layer)], bias)))
    with forwards_replaced(forwards):
        yield


def packed_sizes(model: PreTrainedModel) -> list[int]:
    """Return the bytes of each copy in float32; to be called without autocast. Weights without data will do."""
    return [4 * numel for numel in {_key(layer): layer.weight.numel() for layer in _layers(model)}.values()]


def compiles_by_shape(model: PreTrainedModel) -> bool:
    """Whether each new number of rows of a decoding step takes time and memory: where oneDNN computes on a CPU.

    To be asked before weights are packed.
    """
    if fills_rows(model):
        return True
    return model.device.type == "cpu" and (has_fast_products(model) or bool(_layers(model)))


def _layers(model: PreTrainedModel) -> list[nn.Linear | Conv1D]:
    """Return the layers whose products packed weights make faster."""
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return []
    layers: list[nn.Linear | Conv1D] = []
    if not torch.is_autocast_enabled("cpu"):
        layers = [module for module in model.modules() if is_plain_linear(module)] if is_faster_packed() else []
    elif torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        layers = layers_that_autocast(model, torch.bfloat16)
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


def _pack(layer: nn.Linear | Conv1D, dtype: torch.dtype) -> Tensor:
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))
    return packed


def _product(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Return `[…, out]` of `[…, in]`."""
    flat = rows.reshape(-1, rows.shape[-1]).to(packed.dtype)
    return times_transposed(flat, packed, bias).view(*rows.shape[:-1], len(packed))
