"""Smoothing: by hand arithmetic on short runs; what was not measured changes no level and fires no rule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppo_rlhf.training.tuning.curves import Curves

NAN = float("nan")
KEY = "objective/kl"


def curves(*values: float | None, batch_size: int = 64, skipped: int = 0) -> Curves:
    return Curves([{KEY: value} for value in values], batch_size, skipped)  # type: ignore[dict-item]


@pytest.mark.parametrize(("iterations", "window"), [(1, 1), (3, 1), (7, 1), (8, 2), (39, 9), (40, 10), (400, 10)])
def test_the_window_is_a_quarter_of_a_short_run_and_ten_iterations_of_a_long_one(iterations: int, window: int):
    assert curves(*[1.0] * iterations).window == window


def test_the_last_level_is_the_mean_of_the_last_window():
    assert curves(9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 4.0).last(KEY) == 2.5


def test_the_median_is_that_of_the_last_window_without_what_is_not_finite():
    assert curves(*[9.0] * 30, 1.0, 1e6, NAN, 2.0, 3.0, math.inf, 1e6, 1.0, 2.0, 2.5).median(KEY) == 2.25
    assert math.isnan(curves(*[9.0] * 8, NAN, NAN).median(KEY))


def test_the_start_is_the_mean_of_as_few_iterations_as_hold_64_responses():
    values = [1.0, 3.0, 5.0, 7.0, *[100.0] * 36]
    assert curves(*values, batch_size=64).start(KEY) == 1.0
    assert curves(*values, batch_size=32).start(KEY) == 2.0
    assert curves(*values, batch_size=16).start(KEY) == 4.0
    assert curves(*values, batch_size=1).start(KEY) == (1 + 3 + 5 + 7 + 600) / 10  # a window at most


def test_the_start_above_zero_passes_over_a_start_of_zero_alone():
    assert curves(0.0, 3.0, *[9.0] * 38, batch_size=32).start_above_zero(KEY) == 1.5
    assert curves(0.0, NAN, 0.0, 1.0, 3.0, *[9.0] * 35, batch_size=32).start_above_zero(KEY) == 2.0
    assert curves(*[0.0] * 40).start_above_zero(KEY) == 0.0
    assert math.isnan(curves(NAN, *[9.0] * 39).start_above_zero(KEY))


def test_the_extremes_are_those_of_window_means_not_of_single_iterations():
    values = [0.0, 0.0, 6.0, 0.0, -2.0, -2.0, 3.0, 3.0]
    assert curves(*values).highest(KEY) == 3.0
    assert curves(*values).lowest(KEY) == -2.0


def test_the_extremes_agree_with_a_loop_over_all_windows():
    values = np.random.default_rng(0).normal(size=53)
    values[[4, 17, 18, 40]] = [NAN, math.inf, -math.inf, NAN]
    windows = [values[i : i + 10] for i in range(53 - 10 + 1)]
    means = [np.mean([v for v in window if math.isfinite(v)]) for window in windows]
    assert curves(*values).highest(KEY) == pytest.approx(max(means), rel=1e-12)
    assert curves(*values).lowest(KEY) == pytest.approx(min(means), rel=1e-12)


def test_the_standard_error_is_that_of_the_last_window():
    values = [*[50.0] * 12, 1.0, 2.0, 3.0, 4.0]
    assert curves(*values).standard_error(KEY) == pytest.approx(math.sqrt(5 / 3 / 4), rel=1e-12)
    assert math.isnan(curves(1.0, 2.0, 3.0).standard_error(KEY))


@pytest.mark.parametrize("hole", [NAN, None, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out_of_every_level(hole: float | None):
    holed = curves(2.0, hole, 4.0, 4.0, 6.0, 6.0, hole, 8.0)
    assert (holed.last(KEY), holed.lowest(KEY), holed.highest(KEY)) == (8.0, 2.0, 8.0)


def test_a_metric_that_was_never_measured_has_no_level_and_passes_no_threshold():
    unknown = [getattr(curves(1.0, 2.0), level)("val/nothing") for level in ("last", "start", "highest", "lowest")]
    assert all(math.isnan(level) for level in unknown)
    assert not any(level > 0.0 or level < 0.0 for level in unknown)
    assert math.isnan(curves().last(KEY))
    assert math.isnan(curves().highest(KEY))


def test_rows_are_put_in_the_order_of_their_iterations():
    rows = [{"iteration": 3.0, KEY: 30.0}, {"iteration": 1.0, KEY: 10.0}, {"iteration": 2.0, KEY: 20.0}]
    assert Curves(rows, 64).values(KEY).tolist() == [10.0, 20.0, 30.0]


def test_iterations_in_which_the_policy_stood_still_are_left_out():
    rows = [{"iteration": float(i), KEY: float(i)} for i in range(1, 9)]
    assert Curves(rows, 64, skipped=3).values(KEY).tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert Curves(rows[5:], 64, skipped=3).iterations == 3  # the run went on from a checkpoint: none of them is here


def test_evaluations_are_the_iterations_that_measured_all_that_is_asked_for():
    rows = [{"a": 1.0}, {"a": 2.0, "b": 20.0}, {"a": NAN, "b": 30.0}, {"a": 4.0, "b": 40.0}]
    assert Curves(rows, 64).evaluations("a", "b") == [(2.0, 20.0), (4.0, 40.0)]
    assert Curves([], 64).evaluations("a", "b") == []
