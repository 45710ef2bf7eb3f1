"""Gradient checkpointing (Chen et al. 2016, arXiv:1604.06174): layers recompute their activations in the backward pass.

transformers' layers checkpoint only in training mode. Their submodules stay in evaluation mode, because some draw
noise in training mode (the routers of PhiMoE and Mixtral).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    """Let a model checkpoint within `recomputing`; raise `ModelError` if its architecture cannot."""
    check_gradient_checkpointing(model)
    # nothing random is computed, so the state of the random numbers need not be kept
    getattr(model, f"{NAME}_enable")({"use_reentrant": False, "preserve_rng_state": False})


def disable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let a model checkpoint no more, if it does."""
    if getattr(model, f"is_{NAME}"):
        getattr(model, f"{NAME}_disable")()


@contextmanager
def recomputing(*models: nn.Module) -> Iterator[None]:
    """Let models checkpoint within the block; outside it they decode with a cache, which checkpointing forbids."""
    marked = [m for model in models for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in marked:
        module.training = True
    try:
        yield
    finally:
        for module in marked:
            module.training = False
