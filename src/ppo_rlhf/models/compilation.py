"""The layers of a backbone, compiled by torch where they score and train; everywhere else they run as they are.

Layers and nothing else: they share one compiled form, so that a deep model takes no longer to compile than a shallow
one. Attention without padding stays out of it, since it knows lengths as numbers: compiled, it would be compiled anew
for each batch. Module names, parameters and copies of the model know nothing of all this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.forwards import Forward, forwards_replaced
from ppo_rlhf.models.packed_attention import keep_attention_out_of_graphs

BACKEND = "inductor"
MOST_FORMS = 64
"""Compiled forms that a kind of layer may have: with gradients and without, for each precision, for the first layer of
a model with adapters and the others … Torch warns and stops compiling where there are more."""

_forwards: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, Forward]]] = WeakKeyDictionary()


def compile_layers(backbone: PreTrainedModel, *, checkpointing: bool = False) -> None:
    """Let a backbone's layers be compiled wherever `compiled_layers` asks for it; torch does so at their first call.

    Args:
        backbone: A transformer without its head; the same modules later, the weights may be others.
        checkpointing: Whether layers keep their inputs alone for the backward pass and compute the rest again. Not by
            transformers' switch: that would lie within what is compiled, and run as it is in the backward pass.

    Raises:
        ModelError: Its architecture does not say what its layers are.
    """
    keep_attention_out_of_graphs()
    _forwards[backbone] = [(layer, _compiled(layer, checkpointing)) for layer in _layers(backbone)]


@contextmanager
def compiled_layers(backbone: PreTrainedModel) -> Iterator[None]:
    """Within the block the forward passes of a backbone run compiled, if `compile_layers` was called for it."""
    with forwards_replaced(_forwards.get(backbone, [])):
        yield


def is_compiled(backbone: PreTrainedModel) -> bool:
    """Whether `compile_layers` was called for a backbone."""
    return backbone in _forwards


def check_layers(backbone: PreTrainedModel) -> None:
    """Raise `ModelError` if the model's architecture does not say what its layers are."""
    _layers(backbone)


def check_compiler(device: torch.device) -> None:
    """Compile something tiny for a device.

    Raises:
        ConfigError: It cannot be compiled: there is no C++ compiler, say.
    """
    problem = _problem(device.type)
    if problem is not None:
        raise ConfigError(
            f"ppo.compile=true: torch cannot compile here ({problem}). On the CPU it needs a C++ compiler such as g++ "
            "on the PATH, on CUDA Triton and a C compiler: install it, or leave the setting out"
        )


@cache
def _problem(device_type: str) -> str | None:
    """Return what torch says when it fails to compile, in one line; None if it does not fail."""

    def shifted(values: Tensor) -> Tensor:
        return values + 1.0

    try:
        torch.compile(shifted, backend=BACKEND)(torch.zeros(8, device=device_type))
    except RuntimeError as error:  # torch's own, with the reason among lines of advice
        lines = [line.strip() for line in str(error).splitlines()]
        return next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)
    return None


def _layers(backbone: PreTrainedModel) -> list[nn.Module]:
    names = set(backbone._no_split_modules or ())
    layers = [module for module in backbone.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"ppo.compile=true: {type(backbone).__name__} does not say which of its modules are layers "
            "(_no_split_modules); set it to false"
        )
    return layers


def _compiled(layer: nn.Module, checkpointing: bool) -> Forward:
    compiled: Forward = torch.compile(  # type: ignore[call-overload]  # torch's overloads leave the limit out
        layer.forward, backend=BACKEND, dynamic=True, recompile_limit=MOST_FORMS
    )
    if not checkpointing:
        return compiled

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        return checkpoint(compiled, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward
