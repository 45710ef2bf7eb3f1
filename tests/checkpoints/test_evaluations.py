"""The log of a run's evaluations chooses its best checkpoint."""

import math
import re

import pytest

from ppo_rlhf.checkpoints.evaluations import EVALUATIONS, add_evaluation, best_iteration, best_saved, read_evaluations
from ppo_rlhf.checkpoints.files import checkpoint_name
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime.names import TRAINING_KL


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


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ('"eval/reward": 0.9', '"eval/reward": 0.1'),  # a flipped bit or two
        ("0.25", "0.24"),
        (r",\n   0.25", ""),  # fewer scores
        ('"iteration": 20.0', '"iteration": 21.0'),
        ('"sha256": "', '"sha256": "0'),
        ('"sha256"', '"md5"'),
    ],
)
def test_a_log_that_differs_from_what_was_written_is_damaged(tmp_path, written, found):
    add_evaluation(tmp_path, row(10, 1.0, 0.5))
    add_evaluation(tmp_path, row(20, 1.0, 0.9, scores=[0.5, 0.25]))
    file = tmp_path / EVALUATIONS
    changed = re.sub(written, found, file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    for read in (read_evaluations, lambda folder: best_saved(folder, kl_alarm=20.0)):
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))}: damaged \(row [12] differs"):
            read(tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"eval/reward": math.nan}, {"eval/judge_score": math.inf}, {"eval/kl": math.nan}, {"iteration": "20"}],
)
def test_no_evaluation_decides_by_what_is_no_finite_number(tmp_path, values):
    """Of NaN and a number, Python's `max` returns the first."""
    add_evaluation(tmp_path, row(10, 1.0, 0.5) | values)
    with pytest.raises(CheckpointError, match=r"damaged \(.*number"):
        read_evaluations(tmp_path)


def test_the_best_saved_one_may_be_the_newest_and_is_none_that_comes_after_it(tmp_path):
    for iteration, reward in ((10, 0.5), (20, 0.7), (30, 0.9)):
        (tmp_path / checkpoint_name(iteration)).mkdir()
        add_evaluation(tmp_path, row(iteration, 1.0, reward))
    assert best_saved(tmp_path, kl_alarm=20.0, newest=20) == 20
    assert best_saved(tmp_path, kl_alarm=20.0) == 30
