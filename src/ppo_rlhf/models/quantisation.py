"""Frozen weights in 4 bits by bitsandbytes: NF4, doubly quantised (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

Every linear layer except the language-model head is `bitsandbytes.nn.Linear4bit`. A pass unpacks one layer's weights at
a time to the type of the computation. bitsandbytes is optional: it is imported only where a run asks for it.
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
"""The first whose passes with and without gradients multiply by the same kernel, so that the first ratio is 1."""
BLOCK, BLOCK_OF_SCALES = 64, 256
"""Weights that share a scale of 8 bits, and such scales that share one of 32 bits: (4 + 8/64 + 32/(64·256)) bits."""


def check_bitsandbytes(settings: str) -> None:
    """Raise `ConfigError` if bitsandbytes is not installed, or too old, for the settings that need it."""
    fix = f'pip install "{NEEDED}", or change the setting'
    try:
        version = importlib.metadata.version(NEEDED.name)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{settings}: {NEEDED.name} is not installed; {fix}") from None
    if not NEEDED.specifier.contains(version, prereleases=True):
        raise ConfigError(f"{settings}: {NEEDED.name} {version} is too old; {fix}")


def four_bit_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return how transformers quantises a model that computes in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def prepare_quantised(model: PreTrainedModel) -> None:
    """Prepare a model that transformers has quantised for adapters on it and on its backbone."""
    backbone: Any = model.base_model
    backbone.is_loaded_in_4bit = True  # peft reads it; transformers has marked only the whole model
    for module in model.modules():
        if is_quantised(module):
            layer: Any = module
            # else CPUs with bfloat16 repack weights at the first pass without gradients, and then compute none
            layer.support_avx512bf16_for_cpu = False


def is_quantised(layer: nn.Module) -> bool:
    """Return whether a layer is a linear one whose weights bitsandbytes holds in 4 bits."""
    own = layer.parameters(recurse=False)  # peft's layers show the weight of the layer within as theirs
    return any(getattr(parameter, "quant_state", None) is not None for parameter in own)


def quantisation_states(model: nn.Module) -> list[Any]:
    """Return bitsandbytes' scales and shapes of all 4-bit weights: models that share weights share these too."""
    return [cast(Any, layer.weight).quant_state for layer in model.modules() if is_quantised(layer)]


@torch.no_grad()
def unquantised(layer: nn.Module, summand: Tensor | None = None) -> nn.Linear | Conv1D:
    """Return a plain layer, of the class that was quantised, with the weights that a 4-bit layer computes with.

    `summand` `[outputs, inputs]` is added to them. The layer is on the CPU, in float32: a GPU that needs 4 bits has no
    room for it.
    """
    from bitsandbytes.functional import dequantize_4bit

    source: Any = layer
    weight = dequantize_4bit(source.weight.data, source.weight.quant_state).float()
    weight = (weight if summand is None else weight + summand).cpu()
    with torch.device("meta"):
        plain: Any = nn.Linear(source.in_features, source.out_features, source.bias is not None)
        if source.source_cls is Conv1D:  # GPT-2's, which stores W transposed
            plain, weight = Conv1D(source.out_features, source.in_features), weight.T.contiguous()
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if source.bias is not None:
        plain.bias = nn.Parameter(source.bias.float().cpu(), requires_grad=False)
    return plain


def forget_quantisation(model: PreTrainedModel) -> None:
    """Remove what marks a model as quantised, once no layer is: it would be saved, and loaded, as such."""
    marked: Any = model
    marked.hf_quantizer.remove_quantization_config(model)
    marked.is_loaded_in_4bit = marked.base_model.is_loaded_in_4bit = False


def four_bit_bytes(weight: Tensor) -> int:
    """Return the bytes that a weight takes in 4 bits, with its scales; 4.127 bits a number."""
    numbers = weight.numel()
    blocks = math.ceil(numbers / BLOCK)
    return math.ceil(numbers / 2) + blocks + 4 * math.ceil(blocks / BLOCK_OF_SCALES)
