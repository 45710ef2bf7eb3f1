"""Smoothing, worked out by hand on short runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppo_rlhf.advice.curves import Run
from tests.advice.support import config

NAN = math.nan
KEY = "objective/kl"


def run(*values: float | None, **settings) -> Run:
    return Run(config(**settings), [{KEY: value} for value in values])


@pytest.mark.parametrize(("iterations", "window"), [(1, 1), (7, 1), (8, 2), (39, 9), (40, 10), (400, 10)])
def test_the_window_is_a_quarter_of_a_short_run_and_ten_iterations_of_a_long_one(iterations: int, window: int):
    assert run(*[1.0] * iterations).window == window


@pytest.mark.parametrize(("batch", "start"), [(128, 1.0), (96, 1.0), (64, 1.0), (48, 2.0), (32, 2.0), (16, 4.0), (1, 61.6)])
def test_the_start_is_the_mean_of_as_few_iterations_as_hold_64_responses(batch: int, start: float):
    values = [1.0, 3.0, 5.0, 7.0, *[100.0] * 36]
    assert run(*values, per_device_train_batch_size=batch).start(KEY) == start  # of one response: a window at most


@pytest.mark.parametrize("hole", [NAN, None, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_left_out_of_every_level(hole: float | None):
    holed = run(2.0, hole, 4.0, 4.0, 6.0, 6.0, hole, 8.0)
    assert (holed.last(KEY), holed.lowest(KEY), holed.highest(KEY)) == (8.0, 2.0, 8.0)


def test_the_median_is_that_of_the_last_window():
    assert run(*[9.0] * 30, 1.0, 1e6, NAN, 2.0, 3.0, math.inf, 1e6, 1.0, 2.0, 2.5).median(KEY) == 2.25


def test_the_extremes_are_means_of_windows():
    values = np.random.default_rng(0).normal(size=53)
    values[[4, 17, 18, 40]] = NAN
    means = [np.nanmean(values[i : i + 10]) for i in range(53 - 10 + 1)]
    assert run(*values).highest(KEY) == pytest.approx(max(means), rel=1e-9)
    assert run(*values).lowest(KEY) == pytest.approx(min(means), rel=1e-9)


def test_an_unmeasured_metric_has_no_level():
    for empty in (run(1.0, 2.0), run()):
        for level in (empty.last, empty.start, empty.highest, empty.lowest, empty.median, empty.end):
            assert math.isnan(level("val/nothing"))


def test_rows_are_sorted_by_iteration_and_the_critics_warm_up_is_left_out():
    rows = [{"iteration": float(i), KEY: float(i)} for i in (3, 1, 2, 4)]
    assert Run(config(), rows).values(KEY).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert Run(config(critic_warmup_iterations=2), rows).values(KEY).tolist() == [3.0, 4.0]
