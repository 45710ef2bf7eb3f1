"""Arguments of `generate` as transformers and TRL's first PPOTrainer name them, in terms of our sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ppo_rlhf.config.settings_group import closest
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.tokenizers import ids_within
from ppo_rlhf.ppo.sampling import SamplingSettings


def _max_new_tokens(sampling: SamplingSettings, value: Any) -> dict[str, Any]:
    if not 1 <= value <= sampling.response_length:
        raise ConfigError(
            f"generate: max_new_tokens={value} is not in 1 to ppo.response_length={sampling.response_length}, the most "
            "that is trained on; change the one or the other"
        )
    return {"response_length": int(value)}


def _min_length(sampling: SamplingSettings, value: Any) -> dict[str, Any]:
    if value > 0:
        raise ConfigError(
            f"generate: min_length={value} counts the query's tokens too; give min_new_tokens, or -1 for no minimum"
        )
    return {"min_response_length": 0}


def _do_sample(sampling: SamplingSettings, value: Any) -> dict[str, Any]:
    return {} if value else {"top_k": 1, "top_p": 1.0}


def _stop_ids(sampling: SamplingSettings, value: Any) -> dict[str, Any]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return {"stop_token_ids": tuple(map(int, ids))}


_ARGUMENTS: dict[str, Callable[[SamplingSettings, Any], dict[str, Any]]] = {
    "max_new_tokens": _max_new_tokens,
    "min_length": _min_length,  # before min_new_tokens, which counts where both are given
    "min_new_tokens": lambda _, value: {"min_response_length": int(value or 0)},
    "temperature": lambda _, value: {"temperature": float(value)},
    "top_k": lambda _, value: {"top_k": int(value or 0)},
    "top_p": lambda _, value: {"top_p": 1.0 if value is None else float(value)},
    "pad_token_id": lambda sampling, value: {"pad_token_id": sampling.pad_token_id if value is None else int(value)},
    "eos_token_id": _stop_ids,
    "do_sample": _do_sample,  # the last: without sampling the filters are not looked at
}


def sampling_from_arguments(
    sampling: SamplingSettings, arguments: Mapping[str, Any], vocabulary: int
) -> SamplingSettings:
    """Return the run's sampling settings, changed by arguments of `generate`.

    `top_k` 0 or None and `top_p` 1 or None are off, as is `min_length` -1. `do_sample=False` takes the most probable
    token. An end-of-text id outside the vocabulary ends nothing.

    Args:
        sampling: The run's own.
        arguments: By the names of transformers' `generate`.
        vocabulary: Number of token ids of the model.

    Raises:
        ConfigError: An argument is not known, or its value cannot be used.
    """
    for name, value in arguments.items():
        if name not in _ARGUMENTS:
            raise ConfigError(
                f"generate: {name}={value!r} is not an argument of this sampler.{closest(name, list(_ARGUMENTS))} "
                f"There are {', '.join(_ARGUMENTS)}"
            )
    changed = sampling
    for name, change in _ARGUMENTS.items():
        if name in arguments:
            changed = dataclasses.replace(changed, **_of_right_type(sampling, name, change, arguments[name]))
    changed = dataclasses.replace(changed, stop_token_ids=ids_within(changed.stop_token_ids, vocabulary))
    _check(changed, vocabulary)
    return changed


def _of_right_type(
    sampling: SamplingSettings, name: str, change: Callable[[SamplingSettings, Any], dict[str, Any]], value: Any
) -> dict[str, Any]:
    try:
        return change(sampling, value)
    except ConfigError:
        raise
    except (TypeError, ValueError):
        raise ConfigError(f"generate: {name}={value!r} is not a number") from None


def _check(sampling: SamplingSettings, vocabulary: int) -> None:
    rules = {
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
