"""Passes over rows: fewer rows in a pass when memory runs out, and tables of their results."""

import weakref

import pytest
import torch

from ppo_rlhf.passes import halvings
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.rows import filled_rows, in_passes
from tests.memory_errors import KINDS


@pytest.mark.parametrize(("fits", "passes"), [(8, [8, 1]), (4, [4, 4, 1]), (1, [1] * 9)])
def test_rows_are_computed_once_in_their_order_in_passes_that_fit(fits, passes):
    rows, computed = [3, 1, 4, 0, 5, 8, 2, 6, 7], []

    def compute(groups):
        for group in groups:
            if len(group) > fits:
                raise KINDS["CUDA"]
            computed.extend(group)
            yield [10 * row for row in group]

    done = in_passes(rows, 8, compute)
    assert computed == rows
    assert [len(group) for group, _ in done] == passes
    assert [result for _, results in done for result in results] == [10 * row for row in rows]


def test_passes_that_ended_before_memory_ran_out_are_not_computed_again():
    tried, halving = [], Halving("a pass")

    def compute(groups):
        for group in groups:
            tried.append(group)
            if group == [4, 5, 6, 7]:
                raise KINDS["CUDA"]
            yield group

    done = in_passes(range(9), 4, compute, halving)
    assert tried == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [6, 7], [8]]
    assert [row for rows, _ in done for row in rows] == [*range(9)]
    assert halving.count == 1


def test_no_rows_need_no_pass():
    assert in_passes([], 4, lambda groups: pytest.fail("computed")) == []


def test_what_the_failed_pass_computed_is_gone_before_the_cache_is_emptied(monkeypatch):
    """Else a library that allocates beside torch finds the memory as full as before."""
    alive, seen = [], []
    monkeypatch.setattr(halvings.torch.cuda, "empty_cache", lambda: seen.append([each() for each in alive]))

    def forward(group):
        states = torch.zeros(len(group))
        alive.append(weakref.ref(states))
        if len(group) > 1:
            raise KINDS["cuBLAS"]
        return states.sum()

    in_passes([0, 1], 2, lambda groups: (forward(group) for group in groups))
    assert seen == [[None]]


def test_rows_are_filled_in_their_first_columns():
    actual = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0]])]
    filled = filled_rows(4, 3, [[2, 0], [3]], actual, torch.float64)
    assert filled.tolist() == [[3.0, 4.0, 0.0], [0.0] * 3, [1.0, 2.0, 0.0], [5.0, 0.0, 0.0]]
    assert filled.dtype == torch.float64
