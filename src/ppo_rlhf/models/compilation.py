"""torch.compile for the layers of a backbone.

Layers are compiled one by one and share one compiled form, so a deep model compiles as fast as a shallow one. Attention
without padding stays out of it (`packed_attention`), since it knows lengths as numbers.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.forward import backbone_of, logits_of, packs

log = logging.getLogger(__name__)

BACKEND = "inductor"
MOST_FORMS = 64
"""Compiled forms of one kind of layer: with and without gradients, by precision, with and without adapters. torch stops
compiling where there are more."""


def compile_layers(model: PreTrainedModel) -> None:
    """Let torch compile the layers of a language model or backbone at their first call.

    Raises:
        ModelError: The architecture does not say which of its modules are layers.
    """
    packs(backbone_of(model))  # probed before: of the layers as they are
    if model.get_output_embeddings() is not None:
        logits_of(model)
    layers, limit = layers_of(model), {"recompile_limit": MOST_FORMS}
    known = inspect.signature(torch.compile).parameters
    if "recompile_limit" not in known:  # torch 2.11 has one limit for the whole process
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
    """Compile something tiny for a device.

    Raises:
        ConfigError: It cannot be compiled, for example without a C++ compiler.
    """
    try:
        torch.compile(lambda values: values + 1.0, backend=BACKEND)(torch.zeros(8, device=device))
    except RuntimeError as error:  # torch's own, with the reason among lines of advice
        lines = [line.strip() for line in str(error).splitlines()]
        problem = next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)
        raise ConfigError(
            f"ppo.compile=true: torch cannot compile here ({problem}). On the CPU it needs a C++ compiler such as g++ "
            "on the PATH, on CUDA Triton and a C compiler: install it, or leave the setting out"
        ) from error


@cache
def compiles(device: torch.device) -> bool:
    """Return whether something can be compiled for a device; where not, the reason is logged once."""
    try:
        check_compiler(device)
    except ConfigError as error:
        why = str(error).removeprefix("ppo.compile=true: ")
        log.warning("ppo.rollout_engine=hf decodes without compiled layers and CUDA graphs: %s", why)
        return False
    return True
