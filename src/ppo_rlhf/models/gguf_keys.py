"""Hands out the keys of a GGUF file; at the end, a key that nobody asked for and that is not irrelevant is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast, overload

import numpy as np

T = TypeVar("T", int, float, str, bool)

IRRELEVANT = (
    *("general.", "quantize.imatrix."),  # who made the file, of which models, and how
    "tokenizer.chat_template.",  # further chat templates, which a caller would have to name
    "tokenizer.chat_templates",  # their names
    *(f"tokenizer.ggml.{part}_token_id" for part in ("seperator", "cls", "mask")),  # codespell:ignore seperator
    # tokens that code models put around a gap
    *(f"tokenizer.ggml.{part}_token_id" for part in ("prefix", "suffix", "middle")),
    *(f"tokenizer.ggml.fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
)
"""Keys, and beginnings of keys, that change neither a model's tokens nor its numbers."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "split.no": (0,),
    "split.count": (0, 1),
    "{}.attention.causal": (True,),
    "{}.expert_count": (0,),
    "{}.expert_used_count": (0,),
    "{}.tensor_data_layout": ("Meta AI original pth",),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
}
"""Keys that mean what an absent key means if they have one of these values; {} stands for the architecture."""


class Keys:
    """The keys of a GGUF file that nobody asked for yet."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)
        self.architecture = self.take("general.architecture", str)

    @overload
    def take(self, key: str, kind: type[T]) -> T: ...
    @overload
    def take(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def take(self, key: str, kind: type[T], default: None) -> T | None: ...
    def take(self, key: str, kind: type[T], default: Any = ...) -> T | None:
        """Return the value of a key; {} in the key stands for the architecture. An integer must be positive or 0.

        Raises:
            ValueError: The value is of another kind, or there is neither a value nor a default.
        """
        name = key if "{}" not in key else key.format(self.architecture)
        value = self._left.pop(name, default)
        if value is ...:
            raise ValueError(f"the key {name} is missing")
        if value is default:
            return default
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ValueError(f"{name}={value!r:.60}")
        return cast(T, value)

    def take_texts(self, key: str) -> list[str]:
        """Return a list of texts, which is empty if there is no such key."""
        value = self._left.pop(key, [])
        if not isinstance(value, list):
            raise ValueError(f"{key}={value!r:.60}")
        return value

    def take_numbers(self, key: str) -> list[float]:
        """Return a list of numbers, which is empty if there is no such key."""
        value = self._left.pop(key, np.empty(0))
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{key}={value!r:.60}")
        return list(value.tolist())

    def refuse_others(self) -> None:
        """Raise `ValueError` if a key is left that may change the model."""
        for key, values in NEUTRAL.items():
            name = key.format(self.architecture)
            if name in self._left and (value := self._left.pop(name)) not in values:
                raise ValueError(f"{name}={value!r:.60} has no counterpart")
        others = [key for key in self._left if not key.startswith(IRRELEVANT)]
        if others:
            key, more = others[0], f", and {len(others) - 1} more keys" if others[1:] else ""
            raise ValueError(f"{key}={self._left[key]!r:.60} has no counterpart{more}")
