"""Compiles the layers of a backbone with torch.compile.

Each layer is compiled by itself, and all layers share one compiled form, so a deep model compiles as fast as a shallow
model. Attention without padding (`packed_attention`) is not compiled, since it reads sequence lengths as Python
numbers.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.passes.forward import backbone_of, logits_of, packs

log = logging.getLogger(__name__)

BACKEND = "inductor"
MOST_FORMS = 64
"""The most compiled forms of one kind of layer: torch compiles a layer separately with and without gradients, for each
precision, and with and without adapters."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the layers of a language model or backbone with torch; each layer compiles at the layer's first call.

    Raises:
        ModelError: The architecture does not say which of its modules are layers.
    """
    packs(backbone_of(model))  # cache the probes' results before compiling, because the probes need the original layers
    if model.get_output_embeddings() is not None:
        logits_of(model)
    layers, limit = layers_of(model), {"recompile_limit": MOST_FORMS}
    # torch 2.11 has one recompile limit for the whole process instead of one for each layer.
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, MOST_FORMS)
        limit = {}
    for layer in layers:
        layer.compile(backend=BACKEND, dynamic=True, **limit)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model.

    Raises:
        ModelError: The architecture does not say which of its modules are layers.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"ppo.compile=true: {type(model).__name__} does not say which of its modules are layers "
            "(_no_split_modules); set it to false"
        )
    return layers


@cache
def check_compiler(device: torch.device) -> None:
    """Compile a tiny function for a device, to check that torch can compile.

    Raises:
        ConfigError: torch cannot compile, for example without a C++ compiler.
    """
    try:
        torch.compile(lambda values: values + 1.0, backend=BACKEND)(torch.zeros(8, device=device))
    except RuntimeError as error:  # torch's error mixes the reason with lines of advice, so only the reason is shown
        lines = [line.strip() for line in str(error).splitlines()]
        problem = next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)
        raise ConfigError(
            f"ppo.compile=true: torch cannot compile here ({problem}). On the CPU torch needs a C++ compiler such as "
            "g++ on the PATH, on CUDA Triton and a C compiler: install them, or leave the setting out"
        ) from error


@cache
def compiles(device: torch.device) -> bool:
    """Return whether torch can compile for a device; if torch cannot compile, log the reason once."""
    try:
        check_compiler(device)
    except ConfigError as error:
        why = str(error).removeprefix("ppo.compile=true: ")
        log.warning("ppo.rollout_engine=hf decodes without compiled layers and CUDA graphs: %s", why)
        return False
    return True
