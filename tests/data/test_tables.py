"""Held-out rows of a table: a seeded share of the distinct rows, and never a copy of a training row."""

import logging

import pytest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.tables import hold_out


def split(keys, share=0.1, maximum=512, seed=1, **options):
    return hold_out(keys, share, maximum, seed, "test", name="rows", **options)


def test_both_parts_are_in_order_and_together_all_rows():
    trained, held_out = split(range(50))
    assert (len(trained), len(held_out)) == (45, 5)
    assert sorted([*trained, *held_out]) == list(range(50))
    assert (trained, held_out) == (sorted(trained), sorted(held_out)) == split(range(50))
    assert held_out != split(range(50), seed=2)[1]


def test_copies_of_a_row_go_to_one_side_and_are_held_out_once_or_all(caplog):
    caplog.set_level(logging.INFO)
    keys = [row % 20 for row in range(60)]
    trained, held_out = split(keys, share=0.25)
    chosen = {keys[row] for row in held_out}
    assert chosen.isdisjoint(keys[row] for row in trained)
    assert (len(trained), len(held_out), len(chosen), max(held_out) < 20) == (45, 5, 5, True)
    assert caplog.messages == ["rows: 10 of 60 are copies of others that are held out, and are left out."]
    assert [len(part) for part in split(keys, share=0.25, copies=True)] == [45, 15]


@pytest.mark.parametrize(
    ("count", "share", "maximum", "held"),
    [(1000, 0.1, 512, 100), (1000, 0.9, 64, 64), (2, 0.01, 512, 1), (3, 0.99, 512, 2), (10, 0.25, 512, 2)],
)
def test_at_least_one_row_stays_on_each_side_and_no_more_than_the_maximum_is_held_out(count, share, maximum, held):
    assert [len(part) for part in split(range(count), share, maximum)] == [count - held, held]


@pytest.mark.parametrize("keys", [[], ["a"], ["a", "a", "a"]])
def test_less_than_two_different_rows_cannot_be_split(keys):
    with pytest.raises(DataError, match=r"rows: [01] "):
        split(keys)
