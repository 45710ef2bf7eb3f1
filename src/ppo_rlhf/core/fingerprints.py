"""Fingerprints: short texts that are equal for equal data, in every process and at any time."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
from functools import partial
from typing import Any

from torch import nn

_VALUES_PER_WEIGHT = 1024


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of plain values, tensors, functions, and models (names, shapes and first values of weights).

    A function or callable object is hashed by its source code. Code of ppo_rlhf, and code whose source cannot be read,
    is hashed by its qualified name, and by its `opinion` if it has one, as an `LLMJudge` has.
    """
    return hashlib.sha256(json.dumps(value, default=_as_plain).encode()).hexdigest()


def _as_plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return [(name, w.shape, w.detach().flatten()[:_VALUES_PER_WEIGHT]) for name, w in value.named_parameters()]
    if hasattr(value, "tolist"):  # arrays and tensors of torch, NumPy and pandas have `tolist`
        return value.tolist()
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if callable(value):
        definition = value if hasattr(value, "__qualname__") else type(value)
        with contextlib.suppress(OSError, TypeError, AttributeError):
            if not definition.__module__.startswith("ppo_rlhf."):
                return inspect.getsource(definition)
        opinion = getattr(value, "opinion", None)
        return definition.__qualname__ if opinion is None else [definition.__qualname__, opinion]
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
