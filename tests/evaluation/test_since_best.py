"""Certain changes of paired scores: exact tests by counting; an evaluation compared with the best one before it."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import binom, ttest_1samp

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.evaluation.policy import PolicyEvaluation
from ppo_rlhf.evaluation.since_best import SCORES, at_most, by_chance, since_best
from tests.evaluation.test_comparison import evaluation as measured


def evaluation(judge=None, reward=None) -> PolicyEvaluation:
    """An evaluation whose responses all have the same tokens."""
    reward = judge if reward is None else reward
    return measured(reward, judge, response_ids=[[1, 2]] * len(reward))


@pytest.mark.parametrize("changes", [[1, 1, 1, 1, 1, 1], [3.0, -1.0, 0.5, 2.0, 0.25], [0, 0, 1, 0], [0, 0], [-1, -2]])
def test_the_probability_is_the_share_of_all_patterns_of_signs_with_as_large_a_mean(changes):
    patterns = itertools.product((1, -1), repeat=len(changes))
    means = [np.dot(pattern, changes) for pattern in patterns]
    expected = np.mean([mean >= sum(changes) - 1e-12 for mean in means])
    assert by_chance(np.array(changes, dtype=float)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("prompts", [2, 7, 12])
def test_the_bound_is_never_below_the_share_of_all_patterns_and_is_it_where_all_rose(prompts):
    patterns = np.array(list(itertools.product((1.0, -1.0), repeat=prompts)))
    rng = np.random.default_rng(prompts)
    for _ in range(20):
        for changes in (
            rng.normal(0.7, size=prompts),
            rng.standard_cauchy(prompts) + 1.0,
            rng.choice([-1.0, 0.0, 1.0], prompts, p=[0.1, 0.2, 0.7]),
            rng.lognormal(0.0, 2.0, prompts) * rng.choice([-1.0, 1.0], prompts, p=[0.1, 0.9]),
        ):
            share = np.mean(patterns @ changes >= changes.sum() - 1e-9)
            assert at_most(changes) >= share * (1.0 - 1e-9)
    rises = rng.lognormal(0.0, 2.0, prompts)
    assert at_most(rises) == pytest.approx(0.5**prompts, rel=1e-9)
    assert at_most(np.append(rises, 0.0)) == pytest.approx(0.5**prompts, rel=1e-9)  # a change of 0 has no sign
    assert at_most(-rises) == at_most(0.0 * rises) == 1.0


@pytest.mark.parametrize(("ups", "downs"), [(60, 4), (50, 14), (400, 112)])
def test_what_is_too_rare_for_drawn_patterns_has_a_probability_near_the_exact_one(ups, downs):
    changes = np.repeat([1.0, -1.0], [ups, downs])
    exact = binom.sf(ups - 1, ups + downs, 0.5)
    assert exact < 1e-5
    assert exact <= by_chance(changes) <= 20.0 * exact


def test_of_many_normal_changes_the_probability_is_students():
    changes = np.random.default_rng(1).normal(0.25, size=100)
    expected = ttest_1samp(changes, 0.0, alternative="greater").pvalue
    assert 0.002 < expected < 0.05
    assert by_chance(changes) == pytest.approx(expected, abs=0.004)  # three errors of 4,999 draws
    assert by_chance(np.array([5.0])) == 1.0


def test_the_best_is_the_highest_mean_of_sft_and_of_the_earlier_evaluations():
    sft, now = evaluation([0, 0, 0, 0], [1, 1, 1, 1]), evaluation([2, 2, 1, 1], [3, 3, 3, 4])
    first = since_best(now, sft, [])
    assert first["eval/since_best_score"] == 1.5
    assert first["eval/since_best_reward"] == 2.25
    assert first["eval/since_best_p"] == 1.0  # none of 16 patterns has a larger rise
    assert first[SCORES] == [2.0, 2.0, 1.0, 1.0]
    assert first["eval/since_best_prompts"] == 4.0

    earlier = [
        {"eval/reward": 2.0, SCORES: [3.0, 3.0, 3.0, 3.0]},
        {"eval/reward": 9.0, SCORES: [1.0, 1.0, 1.0, 2.0]},
        {"eval/reward": 9.0},  # was not the best when it was made
    ]
    found = since_best(now, sft, json.loads(json.dumps(earlier)))
    assert found["eval/since_best_score"] == -1.5
    assert found["eval/since_best_reward"] == 1.25
    assert found["eval/since_best_p"] == pytest.approx(4 * (1 / 16))  # chosen from three and SFT's
    assert SCORES not in found
    assert SCORES not in since_best(now, now, [])  # of equal ones the first stays the best


@pytest.mark.parametrize("scores", [[1.0], [], [[1.0], [1.0], [1.0], [1.0]], [1.0] * 5, [1.0, 1.0, 1.0, math.nan]])
def test_scores_of_other_prompts_are_never_compared(scores):
    """NumPy would compare a single score with each of the four."""
    sft = evaluation([0, 0, 0, 0], [1, 1, 1, 1])
    earlier = [{"iteration": 20.0, "eval/reward": 0.0, SCORES: scores}]
    with pytest.raises(CheckpointError, match=rf"^metrics\.jsonl: iteration 20 has {np.size(scores)} scores, .* 4;"):
        since_best(sft, sft, earlier)


@pytest.mark.slow
def test_rows_that_were_not_the_best_can_be_left_out_of_the_choice():
    """Only evaluations that were the best when they were made keep their scores."""
    rng = np.random.default_rng(0)
    sft, kept, whole = evaluation(rng.normal(size=12)), [], []
    for _ in range(20):
        now = evaluation(rng.normal(size=12))
        assert (
            since_best(now, sft, kept).items()
            >= {key: value for key, value in since_best(now, sft, whole).items() if key != SCORES}.items()
        )
        means = {"eval/reward": float(now.rewards.mean())}
        kept.append(means | since_best(now, sft, kept))
        whole.append(means | {SCORES: now.rewards.tolist()})
    assert 1 <= sum(SCORES in row for row in kept) < 10


def test_without_a_judge_the_reward_is_compared():
    found = since_best(evaluation(reward=[1, 1, 2]), evaluation(reward=[0, 1, 0]), [])
    assert found["eval/since_best_score"] == found["eval/since_best_reward"] == 1.0
