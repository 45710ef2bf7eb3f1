"""The log of a run's evaluations chooses its best checkpoint."""

import pytest

from ppo_rlhf.checkpoints.records import best_iteration
from ppo_rlhf.names import TRAINING_KL


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
