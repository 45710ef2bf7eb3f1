"""Gradient checkpointing: layers keep their inputs alone and compute the rest again in the backward pass.

Chen et al. 2016, arXiv:1604.06174. transformers does so only in the training mode of the modules that checkpoint. What
they consist of stays in evaluation mode: in the other one some draw noise (the routers of PhiMoE, say).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.annotations import PreTrainedModel


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let a model checkpoint its gradients whenever it is in training mode.

    Raises:
        ModelError: Its architecture cannot.
    """
    check_gradient_checkpointing(model)
    # nothing random is computed, so there is no state of random numbers to keep
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def check_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Raise `ModelError` if the model's architecture has no gradient checkpointing."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"ppo.gradient_checkpointing=true: {type(model).__name__} does not support it; set it to false"
        )


@contextmanager
def recomputing(*models: nn.Module) -> Iterator[None]:
    """Let models checkpoint for a while: outside of it they decode with a cache, which checkpointing forbids."""
    marked = [m for model in models for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in marked:
        module.training = True
    try:
        yield
    finally:
        for module in marked:
            module.training = False
