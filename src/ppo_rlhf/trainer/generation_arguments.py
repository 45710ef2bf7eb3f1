"""Arguments of `generate`, named as in transformers and in TRL's first PPOTrainer, as settings of our sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ppo_rlhf.config.settings_group import closest
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.tokenizers import ids_within
from ppo_rlhf.ppo.sampling import SamplingSettings


def _stop_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(map(int, ids))


_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "max_new_tokens": lambda value: {"response_length": int(value)},
    "min_length": lambda _: {"min_response_length": 0},  # before min_new_tokens, which wins if both are given
    "min_new_tokens": lambda value: {"min_response_length": int(value or 0)},
    "temperature": lambda value: {"temperature": float(value)},
    "top_k": lambda value: {"top_k": int(value or 0)},
    "top_p": lambda value: {"top_p": 1.0 if value is None else float(value)},
    "pad_token_id": lambda value: {} if value is None else {"pad_token_id": int(value)},
    "eos_token_id": lambda value: {"stop_token_ids": _stop_ids(value)},
    "do_sample": lambda value: {} if value else {"top_k": 1, "top_p": 1.0},  # last: it overrides the filters
}


def sampling_from_arguments(
    sampling: SamplingSettings, arguments: Mapping[str, Any], vocabulary: int
) -> SamplingSettings:
    """Return the run's sampling settings, changed by arguments of `generate`.

    `top_k` 0 or None and `top_p` 1 or None are off, and so is `min_length` -1. `do_sample=False` takes the most
    probable token. An end-of-text id outside the vocabulary ends nothing.

    Args:
        sampling: The run's sampling settings.
        arguments: Arguments by their names in transformers' `generate`.
        vocabulary: Number of token ids of the model.

    Raises:
        ConfigError: An argument is unknown, or its value cannot be used.
    """
    for name, value in arguments.items():
        if name not in _ARGUMENTS:
            raise ConfigError(
                f"generate: {name}={value!r} is not an argument of this sampler.{closest(name, list(_ARGUMENTS))} "
                f"The arguments are {', '.join(_ARGUMENTS)}"
            )
    changes: dict[str, Any] = {}
    for name, read in _ARGUMENTS.items():
        if name in arguments:
            try:
                changes |= read(arguments[name])
            except (TypeError, ValueError):
                raise ConfigError(f"generate: {name}={arguments[name]!r} is not a number") from None
    changed = dataclasses.replace(sampling, **changes)
    changed = dataclasses.replace(changed, stop_token_ids=ids_within(changed.stop_token_ids, vocabulary))
    _check(changed, sampling.response_length, vocabulary, int(arguments.get("min_length") or 0))
    return changed


def _check(sampling: SamplingSettings, longest: int, vocabulary: int, min_length: int) -> None:
    rules = {
        f"max_new_tokens={sampling.response_length} is not in 1 to ppo.response_length={longest}, the most tokens that "
        "a response may have in training; lower it, or raise ppo.response_length": (
            1 <= sampling.response_length <= longest
        ),
        f"min_length={min_length} counts the query's tokens too; give min_new_tokens, or -1 for no minimum": (
            min_length <= 0
        ),
        f"temperature={sampling.temperature:g} is not above 0; do_sample=False takes the most probable token": (
            sampling.temperature > 0.0
        ),
        f"top_k={sampling.top_k} is below 0": sampling.top_k >= 0,
        f"top_p={sampling.top_p:g} is not above 0 and at most 1": 0.0 < sampling.top_p <= 1.0,
        f"pad_token_id={sampling.pad_token_id} is not an id of the model (0 to {vocabulary - 1})": (
            0 <= sampling.pad_token_id < vocabulary
        ),
        f"min_new_tokens={sampling.min_response_length} is above the {sampling.response_length} tokens of a response": (
            sampling.min_response_length <= sampling.response_length
        ),
    }
    broken = [text for text, holds in rules.items() if not holds]
    if broken:
        raise ConfigError("\n".join(f"generate: {text}" for text in broken))
