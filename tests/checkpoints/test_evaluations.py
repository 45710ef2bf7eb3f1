"""The evaluations of a run choose its best checkpoint."""

import math
import re

import pytest

from ppo_rlhf.checkpoints.evaluations import best_iteration, best_saved, read_evaluations
from ppo_rlhf.checkpoints.files import checkpoint_name
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime.metrics_file import EVALUATION, METRICS, _metrics_of, metrics_of
from ppo_rlhf.runtime.names import TRAINING_KL


def add_evaluation(directory, row):
    metrics_of(directory).append(EVALUATION, int(row["iteration"]), row)


def row(iteration, kl, reward, **judge):
    return {"iteration": float(iteration), "eval/kl": kl, "eval/reward": reward, **judge}


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([], None),
        ([row(10, 1.0, 0.5), row(20, 2.0, 0.9), row(30, 3.0, 0.7)], 20),
        ([row(10, 20.0, 0.5), row(20, 20.1, 0.9)], 10),  # the second is beyond the alarm
        ([row(10, 1.0, 0.5), row(20, 1.0, 0.5)], 20),  # the later of equals
        # of greedy evaluations the KL of the rollouts counts, not that of the most probable tokens
        ([row(10, 1.0, 0.5) | {TRAINING_KL: 1.0}, row(20, 19.0, 0.9) | {TRAINING_KL: 21.0}], 10),
        ([row(10, 1.0, 0.5) | {TRAINING_KL: 1.0}, row(20, 21.0, 0.9) | {TRAINING_KL: 19.0}], 20),
        ([row(10, 1.0, 0.9, **{"eval/judge_score": 0.1}), row(20, 1.0, 0.2, **{"eval/judge_score": 0.3})], 20),
    ],
)
def test_the_best_iteration_has_the_highest_judge_score_else_reward_below_the_alarm(rows, best):
    assert best_iteration(rows, kl_alarm=20.0) == best


def test_an_iteration_that_is_evaluated_again_has_only_its_new_row(tmp_path):
    """A run that was resumed from an earlier checkpoint, perhaps with another judge, evaluates iterations again."""
    for evaluated in (row(10, 1.0, 0.5), row(20, 1.0, 0.9), row(20, 2.0, 0.3)):
        add_evaluation(tmp_path, evaluated)
    assert read_evaluations(tmp_path) == [row(10, 1.0, 0.5), row(20, 2.0, 0.3)]


def test_a_log_that_differs_from_what_was_written_is_damaged_and_chooses_no_best(tmp_path):
    """If a damaged log counted as empty, the best checkpoint would be deleted."""
    add_evaluation(tmp_path, row(10, 1.0, 0.5))
    add_evaluation(tmp_path, row(20, 1.0, 0.9, scores=[0.5, 0.25]))
    file = tmp_path / METRICS
    for written, found in (('"eval/reward": 0.9', '"eval/reward": 0.1'), ("0.25", "0.24"), (", 0.25", "")):
        whole = file.read_text()
        assert written in whole
        file.write_text(whole.replace(written, found))
        for read in (read_evaluations, lambda folder: best_saved(folder, PPOConfig())):
            _metrics_of.cache_clear()  # as in a process that goes on
            with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))}: damaged "):
                read(tmp_path)
        file.write_text(whole)


@pytest.mark.parametrize("values", [{"eval/reward": math.nan}, {"eval/judge_score": math.inf}, {"eval/kl": math.nan}])
def test_no_evaluation_decides_by_what_is_no_finite_number(tmp_path, values):
    """Of NaN and a number, Python's `max` returns the first."""
    add_evaluation(tmp_path, row(10, 1.0, 0.5) | values)
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(str(tmp_path / METRICS))}: .* no finite number {next(iter(values))}"
    ):
        read_evaluations(tmp_path)


def test_no_evaluation_decides_without_the_numbers_that_decide(tmp_path):
    add_evaluation(tmp_path, {"iteration": 10.0, "eval/kl": 1.0})
    assert read_evaluations(tmp_path) == [{"iteration": 10.0, "eval/kl": 1.0}]
    with pytest.raises(CheckpointError, match=r"no finite number eval/reward$"):
        best_saved(tmp_path, PPOConfig())


@pytest.mark.parametrize(
    ("by_number", "by_time", "last", "best"),
    [
        ([10, 20, 30], [], None, 30),
        ([10, 20], [], None, 20),  # the best has no checkpoint
        ([10, 20], [25], None, 20),  # the clock decides about the checkpoint of 25, a signal, or a callback
        ([10, 20], [25], 25, 25),  # the last iteration is saved in every run
        ([10, 20], [25], 35, 20),
        ([], [25], None, None),
        ([], [], None, None),
    ],
)
def test_the_best_saved_one_is_among_those_that_do_not_depend_on_the_clock(tmp_path, by_number, by_time, last, best):
    """One run sent three models to MLflow, the same run, interrupted, two."""
    for iteration in (*by_number, *by_time):
        (tmp_path / checkpoint_name(iteration)).mkdir()
    for iteration, reward in ((10, 0.5), (20, 0.7), (25, 0.9), (30, 0.95)):
        add_evaluation(tmp_path, row(iteration, 1.0, reward))
    assert best_saved(tmp_path, PPOConfig(save_interval=10), last) == best
