"""Number types and kernels: which weights have which precision, where autocast applies, and determinism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.products.processors import has_instructions, lacks_fast_instructions

_REDUCED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FULL = {"float32": torch.float32, "float64": torch.float64}


def torch_dtype(config: PPOConfig) -> torch.dtype:
    """Return the type of weights that train: float32, or float64 if `ppo.dtype` says so.

    Never less than float32: at the learning rates of RLHF a bfloat16 weight is too coarse to move.
    """
    return _FULL.get(config.dtype, torch.float32)


def frozen_dtype(config: PPOConfig) -> torch.dtype:
    """Return the type of weights that never train (reference policy, reward model): what `ppo.dtype` names."""
    return _REDUCED.get(config.dtype) or _FULL[config.dtype]


def type_that_saves_no_time(config: PPOConfig, device: torch.device) -> str | None:
    """Return one line if the device has no fast instructions for `ppo.dtype`, so that it saves no time."""
    if device.type != "cpu" or not lacks_fast_instructions(frozen_dtype(config)):
        return None
    some = has_instructions(frozen_dtype(config))
    lacks = f"ppo.dtype={config.dtype}: this processor has {'only slow' if some else 'no'} instructions for it"
    if config.compile:  # compiled layers compute as torch does
        times = "twice" if some else "many times"
        return f"{lacks}, and with ppo.compile=true training takes {times} as long as in float32. Unset one of them"
    return f"{lacks} and multiplies in float32 what was rounded to 16 bits: no time is saved, and little memory or none"


def autocast(config: PPOConfig, device: torch.device, *, keeps_copies: bool = True) -> AbstractContextManager[object]:
    """Return the context of every forward pass: matrix products in `ppo.dtype` where that is a 16-bit type.

    All passes of a run go through it, so that old and new log-probabilities are those of one and the same computation.

    Passes whose gradients are recorded keep no copies of weights: what uses a weight twice would add its gradients up
    in 16 bits, and passes side by side would empty each other's copies, which belong to the process. The others do: a
    decoding step would cast all weights anew (as it does without fast instructions for 16 bits, if not packed).
    """
    reduced = _REDUCED.get(config.dtype)
    return nullcontext() if reduced is None else torch.autocast(device.type, reduced, cache_enabled=keeps_copies)


def loss_scaler(config: PPOConfig, device: torch.device) -> torch.amp.GradScaler:
    """Return what keeps float16 gradients from vanishing; for every other `ppo.dtype` it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=config.dtype == "float16")


@contextmanager
def deterministic(config: PPOConfig) -> Iterator[None]:
    """Use deterministic kernels alone, if `ppo.deterministic` says so; afterwards all is as it was before.

    The decoding loop stays outside: torch refuses its prefix sums on CUDA, though those of a batch of rows are exact
    repeats.
    """
    if not config.deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
