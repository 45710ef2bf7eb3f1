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


@pytest.mark.parametrize(
    ("batch", "start"), [(128, 1.0), (96, 1.0), (64, 1.0), (48, 2.0), (32, 2.0), (16, 4.0), (1, 61.6)]
)
def test_the_start_is_the_mean_of_as_few_iterations_as_hold_64_responses(batch: int, start: float):
    values = [1.0, 3.0, 5.0, 7.0, *[100.0] * 36]
    assert run(*values, per_device_train_batch_size=batch).start(KEY) == start  # of one response: a window at most


@pytest.mark.parametrize("hole", [NAN, None, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_left_out_of_every_level(hole: float | None):
    holed = run(2.0, hole, 4.0, 4.0, 6.0, 6.0, hole, 8.0)
    assert (holed.start(KEY), holed.last(KEY), holed.highest(KEY)) == (2.0, 8.0, 8.0)


def test_the_typical_level_is_the_median_of_the_whole_run():
    assert run(*[9.0] * 3, 1e6, NAN, 1.0, 2.0, 2.5, math.inf).typical(KEY) == 9.0
    assert run(50.0, *[1e-7] * 30).typical(KEY) == 1e-7


@pytest.mark.parametrize(
    ("settings", "measured"),
    [({}, 0.01 * 14 / 64), ({"num_ppo_epochs": 1, "num_mini_batches": 2}, 0.01 / 8)],  # (0 + 1 + 4 + 9) / 16 / 4
)
def test_updates_in_unlike_directions_walk_the_sum_of_their_kls(settings: dict, measured: float):
    """Each iteration moves the policy by 0.01 nats per token in equal steps, seen before each step."""
    rows = [{"policy/approxkl_avg": measured, "response/length": length} for length in [10.0, 20.0] * 10]
    assert Run(config(**settings), rows).walked == pytest.approx(20 * 0.01 * 15, rel=1e-12)
    assert math.isnan(Run(config(num_ppo_epochs=1), rows).walked)


def test_the_highest_level_is_the_mean_of_a_window():
    values = np.random.default_rng(0).normal(size=53)
    values[[4, 17, 18, 40]] = NAN
    means = [np.nanmean(values[i : i + 10]) for i in range(53 - 10 + 1)]
    assert run(*values).highest(KEY) == pytest.approx(max(means), rel=1e-9)


def test_an_unmeasured_metric_has_no_level():
    for empty in (run(1.0, 2.0), run()):
        for level in (empty.last, empty.start, empty.highest, empty.typical, empty.end):
            assert math.isnan(level("val/nothing"))


def test_the_critics_warm_up_is_no_planned_iteration_of_the_policy():
    assert run(*[1.0] * 20, critic_warmup_iterations=8).planned == 40 - 8
    assert run(*[1.0] * 60, critic_warmup_iterations=8).planned == 60 - 8  # the run was prolonged


def test_rows_are_sorted_by_iteration_and_the_critics_warm_up_is_left_out():
    rows = [{"iteration": float(i), KEY: float(i)} for i in (3, 1, 2, 4)]
    assert Run(config(), rows).values(KEY).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert Run(config(critic_warmup_iterations=2), rows).values(KEY).tolist() == [3.0, 4.0]


def test_the_rise_is_that_of_the_evaluations_where_there_are_any_and_of_training_else():
    rows = [{"objective/scores": score, "objective/scores_std": 0.5} for score in (1.0, 2.0)]
    assert Run(config(), rows).gain == 2.0
    rows[-1] |= {"eval/reward": 1.5, "eval/reward_sft": 1.0}
    assert Run(config(), rows).gain == 1.0
