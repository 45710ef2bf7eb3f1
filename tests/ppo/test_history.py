"""The compact history behaves like the list of rows that it stands for."""

import math
import sys

import pytest

from ppo_rlhf.ppo.history import MetricHistory

ROWS = [{"iteration": 1.0, "kl": 0.1}, {"iteration": 2.0, "eval": math.inf}, {"iteration": 3.0, "kl": -0.0}]


def test_it_is_read_like_the_rows_that_were_appended():
    history = MetricHistory()
    for row in ROWS:
        history.append(row)
    assert list(history) == ROWS
    assert (len(history), history[0], history[-1], history[1:]) == (3, ROWS[0], ROWS[2], ROWS[1:])
    assert history == ROWS
    assert history == MetricHistory(ROWS)
    assert history != ROWS[:2]
    assert history.names == ["iteration", "kl", "eval"]
    with pytest.raises(IndexError):
        history[3]


def test_a_metric_that_is_not_a_number_is_not_a_missing_one():
    history = MetricHistory([{"a": math.nan}, {"b": 1.0}])
    assert math.isnan(history[0]["a"])
    assert history[1] == {"b": 1.0}


@pytest.mark.parametrize("rows", [[], [{}], ROWS, [{"only": 1.0}] * 3])
def test_its_tensors_give_it_back(rows):
    history = MetricHistory(rows)
    tensors = history.tensors()
    assert tensors["values"].shape == tensors["is_present"].shape == (len(rows), len(history.names))
    assert MetricHistory.from_tensors(history.names, tensors) == rows


def test_the_tensors_do_not_follow_the_history():
    history = MetricHistory(ROWS)
    tensors = history.tensors()
    history.append({"iteration": 4.0, "kl": 9.0})
    assert tensors["values"].shape == (3, 3)


def test_a_row_of_60_metrics_takes_less_than_a_kilobyte():
    history = MetricHistory()
    for iteration in range(1000):
        history.append({f"metric/{i}": float(i * iteration) for i in range(60)})
    columns = [sys.getsizeof(column) for store in (history._values, history._present) for column in store.values()]
    assert sum(columns) / 1000 < 1000
