"""Frozen weights in 4 bits by bitsandbytes: NF4, doubly quantised (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

In a quantised model every linear layer except the language-model head is a `bitsandbytes.nn.Linear4bit`. A forward pass
dequantises the weights of one layer at a time. bitsandbytes is imported only if a setting needs bitsandbytes.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any, cast

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.core.errors import ConfigError

NEEDED = Requirement("bitsandbytes>=0.50")
"""The oldest supported bitsandbytes: from this version on the same kernel computes with and without gradients, so that
PPO's first probability ratio is 1."""
BLOCK, BLOCK_OF_SCALES = 64, 256
"""`BLOCK` weights share a scale of 8 bits, and `BLOCK_OF_SCALES` 8-bit scales share a scale of 32 bits. A 4-bit weight
with its scales thus takes 4 + 8/64 + 32/(64·256) bits."""


def check_bitsandbytes(settings: str) -> None:
    """Raise `ConfigError` if bitsandbytes is missing or too old; `settings` names the settings that need it."""
    fix = f'pip install "{NEEDED}", or change the setting'
    try:
        version = importlib.metadata.version(NEEDED.name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{settings}: {NEEDED.name} is not installed; {fix}") from None
    if not NEEDED.specifier.contains(version, prereleases=True):
        raise ConfigError(f"{settings}: {NEEDED.name} {version} is too old; {fix}")


def four_bit_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return transformers' configuration for loading a model in 4 bits that computes in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def prepare_quantised(model: PreTrainedModel) -> None:
    """Prepare a model that transformers has quantised, so that adapters can be added to the model and its backbone."""
    backbone: Any = model.base_model
    # peft reads is_loaded_in_4bit from the backbone, but transformers sets it only on the whole model
    backbone.is_loaded_in_4bit = True
    for module in model.modules():
        if is_quantised(module):
            layer: Any = module
            # A CPU with bfloat16 would repack 4-bit weights in passes without gradients, and lose later gradients.
            layer.support_avx512bf16_for_cpu = False


def is_quantised(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer whose weights bitsandbytes holds in 4 bits."""
    # Not `layer.weight`: a peft layer returns there the weight of the layer that the peft layer wraps.
    parameters = layer.parameters(recurse=False)
    return any(getattr(parameter, "quant_state", None) is not None for parameter in parameters)


def quantisation_states(model: nn.Module) -> list[Any]:
    """Return bitsandbytes' states (scales, shapes) of all 4-bit weights of a model.

    Models that share 4-bit weights share the states.
    """
    return [cast(Any, layer.weight).quant_state for layer in model.modules() if is_quantised(layer)]


@torch.no_grad()
def unquantised(layer: nn.Module, delta: Tensor | None = None) -> nn.Linear | Conv1D:
    """Return a plain layer with the dequantised weights of a 4-bit layer, plus `delta` `[outputs, inputs]`.

    The returned layer has the class that the layer had before quantisation, and is on the CPU in float32, since a GPU
    that needs 4-bit weights has no room for float32 weights.
    """
    from bitsandbytes.functional import dequantize_4bit

    source: Any = layer
    weight = dequantize_4bit(source.weight.data, source.weight.quant_state).float()
    weight = (weight if delta is None else weight + delta).cpu()
    with torch.device("meta"):
        plain: Any = nn.Linear(source.in_features, source.out_features, source.bias is not None)
        if source.source_cls is Conv1D:  # Conv1D, GPT-2's linear layer, stores the weight W transposed
            plain, weight = Conv1D(source.out_features, source.in_features), weight.T.contiguous()
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if source.bias is not None:
        plain.bias = nn.Parameter(source.bias.float().cpu(), requires_grad=False)
    return plain


def forget_quantisation(model: PreTrainedModel) -> None:
    """Remove the marks of a quantised model after its layers were dequantised, so that it is saved as a plain model."""
    marked: Any = model
    marked.hf_quantizer.remove_quantization_config(model)
    marked.is_loaded_in_4bit = marked.base_model.is_loaded_in_4bit = False


def four_bit_bytes(weight: Tensor) -> int:
    """Return the bytes of a weight in 4 bits with its scales: 4.127 bits per number."""
    numbers = weight.numel()
    blocks = math.ceil(numbers / BLOCK)
    return math.ceil(numbers / 2) + blocks + 4 * math.ceil(blocks / BLOCK_OF_SCALES)
