"""Gradient checkpointing (Chen et al. 2016, arXiv:1604.06174): layers recompute their activations in the backward pass.

transformers' layers checkpoint only in training mode. The submodules of the layers stay in evaluation mode, because the
routers of PhiMoE and Mixtral, for example, add noise in training mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from torch import nn
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ModelError

_IS_NEW = hasattr(PreTrainedModel, "activation_checkpointing_enable")
NAME = "activation_checkpointing" if _IS_NEW else "gradient_checkpointing"
"""transformers' name for gradient checkpointing; newer versions call it activation checkpointing."""


def check_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Raise `ModelError` if the model's architecture has no gradient checkpointing."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"ppo.gradient_checkpointing=true: {type(model).__name__} does not support it; set it to false"
        )


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Switch on gradient checkpointing, which takes effect only within a `recomputing` block.

    Raises:
        ModelError: The architecture does not support gradient checkpointing, or this version of transformers marks
            layers differently.
    """
    check_gradient_checkpointing(model)
    # preserve_rng_state is False because the layers draw no random numbers
    getattr(model, f"{NAME}_enable")({"use_reentrant": False, "preserve_rng_state": False})
    if not _marked(model):
        raise ModelError(
            f"ppo.gradient_checkpointing=true: transformers {transformers.__version__} marks no layer of "
            f"{type(model).__name__} as checkpointing; set it to false, or install the version that ppo_rlhf was "
            "tested with (constraints.txt)"
        )


def disable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Switch a model's gradient checkpointing off if it is on."""
    if getattr(model, f"is_{NAME}"):
        getattr(model, f"{NAME}_disable")()


@contextmanager
def recomputing(*models: nn.Module) -> Iterator[None]:
    """Let models use gradient checkpointing within the `with` block only.

    Outside the block models decode with a KV cache, which gradient checkpointing forbids.
    """
    marked = [module for model in models for module in _marked(model)]
    for module in marked:
        module.training = True
    try:
        yield
    finally:
        for module in marked:
            module.training = False


def _marked(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
