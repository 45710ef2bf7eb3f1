"""Any two settings that are changed together build a configuration, or one line names both."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from functools import cache
from itertools import combinations
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.advice import Typical
from ppo_rlhf.core.errors import ConfigError
from tests.config.test_ppo_rules import BROKEN_AND_KEPT


def parts(kind: Any) -> list[Any]:
    """Return what a type is made of, outermost first: the members of a union, the annotations of each."""
    inner = [*get_args(kind), *getattr(kind, "__metadata__", ())] if get_origin(kind) is not Literal else []
    return [kind, *(found for part in inner for found in parts(part))]


def other_values(name: str, kind: Any) -> list[Any]:
    """Return values of a setting: each choice, both ends of the usual range, and those of the rules' own test."""
    found = [case[name] for cases in BROKEN_AND_KEPT for case in cases if name in case]
    for part in parts(kind):
        found += get_args(part) if get_origin(part) is Literal else [True, False] if part is bool else []
        found += [part.low, part.high] if isinstance(part, Typical) else []
        found += [None] if part is type(None) else []
    return found


def one_setting_each() -> list[tuple[str, Any]]:
    hints, changes = get_type_hints(PPOConfig, include_extras=True), []
    for field in fields(PPOConfig):
        default = None if field.default is MISSING else field.default
        known: list[Any] = []
        for value in other_values(field.name, hints[field.name]):
            if value != default and value not in known:
                known.append(value)
        changes += [(field.name, value) for value in known]
    return changes


CHANGES = one_setting_each()


def refusals(*changes: tuple[str, Any]) -> set[str]:
    try:
        PPOConfig(**dict(changes))
    except ConfigError as error:
        return set(str(error).splitlines())
    return set()


@cache
def alone(index: int) -> set[str]:
    return refusals(CHANGES[index])


def check(first: int, second: int) -> None:
    pair = CHANGES[first], CHANGES[second]
    for line in refusals(*pair) - alone(first) - alone(second):
        assert all(re.search(rf"\bppo\.{name}\b", line) for name, _ in pair), (pair, line)


PLACES = st.integers(0, len(CHANGES) - 1)


@given(PLACES, PLACES)
@settings(max_examples=150, deadline=None)
def test_two_settings_build_a_configuration_or_a_line_names_both(first: int, second: int) -> None:
    if CHANGES[first][0] != CHANGES[second][0]:
        check(first, second)


@pytest.mark.slow
def test_all_pairs_of_settings_build_a_configuration_or_a_line_names_both() -> None:
    for first, second in combinations(range(len(CHANGES)), 2):
        if CHANGES[first][0] != CHANGES[second][0]:
            check(first, second)
