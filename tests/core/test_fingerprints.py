"""Fingerprints: equal for equal data in any process, different for different data."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from ppo_rlhf.core.fingerprints import fingerprint


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


class Judge:
    __module__, __qualname__ = "ppo_rlhf.judge", "Judge"

    def __init__(self, opinion: str) -> None:
        self.opinion = opinion

    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]


def test_judges_of_ours_differ_by_what_they_ask():
    assert fingerprint(partial(short, Judge("brief"))) == fingerprint(partial(short, Judge("brief")))
    assert fingerprint(partial(short, Judge("brief"))) != fingerprint(partial(short, Judge("true")))


def short(completions: list[str]) -> list[float]:
    return [-len(text) for text in completions]


def long(completions: list[str]) -> list[float]:
    return [len(text) for text in completions]


class Thing:
    """The `repr` of the object holds its address."""


class Scorer:
    def __call__(self, completions: list[str]) -> list[float]:
        return short(completions)


EQUAL: list[tuple[Any, Any]] = [
    (torch.tensor([1, 2]), [1, 2]),
    ({"a": np.float64(0.5), "b": torch.tensor(1.5)}, {"a": 0.5, "b": 1.5}),
    (linear(0), linear(0)),
    (Thing(), Thing()),
    (Scorer(), Scorer()),
    (pd.Timestamp("2025-01-01"), pd.Timestamp("2025-01-01")),
]
DIFFERENT: list[tuple[Any, Any]] = [
    (torch.tensor([1, 2]), torch.tensor([2, 1])),
    (linear(0), linear(1)),
    (linear(0), nn.Linear(2, 3)),
    (short, long),
    (partial(print, short), partial(print, long)),
    (partial(short, sep=1), partial(short, sep=2)),
    (Scorer(), Thing()),
    ([None], ["None"]),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_data_have_one_fingerprint(one: Any, other: Any):
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_data_have_different_fingerprints(one: Any, other: Any):
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.slow
def test_another_process_gives_the_same_fingerprint():
    """In another process objects have other addresses."""
    code = "from tests.core.test_fingerprints import *; print(fingerprint([Thing(), Scorer(), short, linear(0), len]))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == fingerprint([Thing(), Scorer(), short, linear(0), len])
