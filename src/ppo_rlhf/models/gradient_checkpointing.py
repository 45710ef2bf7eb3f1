"""Gradient checkpointing (Chen et al. 2016, arXiv:1604.06174): layers recompute their activations in the backward pass.

transformers' layers checkpoint only in training mode. Their submodules stay in evaluation mode, because some draw
noise in training mode (the routers of PhiMoE and Mixtral).
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
"""What transformers calls it: newer versions have the first."""


def check_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Raise `ModelError` if the model's architecture has no gradient checkpointing."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"ppo.gradient_checkpointing=true: {type(model).__name__} does not support it; set it to false"
        )


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let a model checkpoint within `recomputing`.

    Raises:
        ModelError: Its architecture cannot, or this version of transformers marks its layers otherwise.
    """
    check_gradient_checkpointing(model)
    # nothing random is computed, so the state of the random numbers need not be kept
    getattr(model, f"{NAME}_enable")({"use_reentrant": False, "preserve_rng_state": False})
    if not _marked(model):
        raise ModelError(
            f"ppo.gradient_checkpointing=true: transformers {transformers.__version__} marks no layer of "
            f"{type(model).__name__} as checkpointing; set it to false, or install the version that ppo_rlhf was "
            "tested with (constraints.txt)"
        )


def disable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let a model checkpoint no more, if it does."""
    if getattr(model, f"is_{NAME}"):
        getattr(model, f"{NAME}_disable")()


@contextmanager
def recomputing(*models: nn.Module) -> Iterator[None]:
    """Let models checkpoint within the block; outside it they decode with a cache, which checkpointing forbids."""
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
