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
from ppo_rlhf.models.linear_products import FEWEST_WEIGHTS, is_faster, is_plain_linear
from ppo_rlhf.models.sixteen_bit_weights import layers_that_autocast


@contextmanager
def packed_weights(model: PreTrainedModel) -> Iterator[None]:
    """Within the block a model's linear layers read packed copies of what their weights are now.

    In float32, or in bfloat16 where that is what autocast computes in. The copies take as much memory as gradients
    do, which are not there at that time; so weights without a gradient (those below LoRA's adapters, say) are left as
    they are. Nothing flows back through the layers.
    """
    packed: dict[tuple[int, bool], Tensor] = {}  # by weight and by which of its sides is out
    layers = _layers(model)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
    try:
        with torch.no_grad():
            for layer in layers:
                key = id(layer.weight), isinstance(layer, Conv1D)
                if key not in packed:
                    packed[key] = _pack(layer, dtype)
                bias = None if layer.bias is None else layer.bias.to(dtype)
                layer.forward = partial(_product, packed[key], bias)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def packed_sizes(model: PreTrainedModel) -> list[int]:
    """Return the bytes of each copy in float32, without autocast, on the CPU; weights without data will do."""
    weights = {id(layer.weight): layer.weight for layer in _worth_packing(_layers_in_float32(model))}
    return [weight.numel() * torch.float32.itemsize for weight in weights.values()]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers to pack."""
    if model.device.type != "cpu" or not _has_onednn():
        return []
    if not torch.is_autocast_enabled("cpu"):
        return _worth_packing(_layers_in_float32(model))
    dtype = torch.get_autocast_dtype("cpu")
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    return _worth_packing(layers_that_autocast(model, dtype))


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


def _layers_in_float32(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if is_plain_linear(module)] if is_faster() and _has_onednn() else []


def _worth_packing(layers: list[nn.Module]) -> list[nn.Module]:
    return [
        layer
        for layer in layers
        if layer.weight.is_cpu
        and layer.weight.dtype == torch.float32
        and layer.weight.requires_grad
        and layer.weight.numel() >= FEWEST_WEIGHTS
        and "forward" not in layer.__dict__  # somebody's own, an offloading hook's say
    ]


def _pack(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))
    return packed


def _product(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Return `[…, out]` of `[…, in]`."""
    flat = rows.reshape(-1, rows.shape[-1]).to(packed.dtype)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(flat, packed, bias, "none", [], "")
    return product.view(*rows.shape[:-1], len(packed))
