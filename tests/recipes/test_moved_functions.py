"""Settings may refer to a recipe's function by the former name of its module."""

from __future__ import annotations

from importlib import import_module

import pytest

from ppo_rlhf.rewards.functions import load_function, split_reference
from ppo_rlhf.runtime.names import MOVED


@pytest.mark.parametrize(("before", "now"), MOVED.items())
def test_a_module_that_has_moved_is_found_by_its_former_name(before: str, now: str):
    assert split_reference(f"{before}:score") == (now, "score")
    import_module(now)


def test_a_function_of_a_module_that_has_moved_is_called():
    optimality = load_function("ppo_rlhf.demo.random_walks:optimality")
    walk = {"prompts": ["b"], "completions": ["c a"], "edges": ["bc ca"], "shortest": [3]}
    assert optimality(**walk) == [1.0]
