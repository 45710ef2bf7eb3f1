"""The judge's score at equal reward: by hand, its false alarms by simulation, and that it finds an exploit."""

from __future__ import annotations

import numpy as np
import pytest

from ppo_rlhf.evaluation.comparison import compare_evaluations
from ppo_rlhf.evaluation.equal_reward import CERTAIN, compare_at_equal_reward
from tests.evaluation.test_comparison import evaluation

RUNS = 200


def test_the_gap_of_a_prompt_is_weighted_by_the_fewer_responses_of_each_equal_reward():
    """By hand. The rewards 1 and 0 are both sides': 1 with the judge's means 1/2 and 1, 0 with 0.2 and 0.3; the fewer
    responses are 1 (of 2 and 1) and 1 (of 1 and 2): (-0.5 - 0.1) / 2. The reward 3 is of one side alone."""
    ours = evaluation([1, 1, 0, 3] * 10, [0, 1, 0.2, 9] * 10, samples=4)
    sft = evaluation([1, 0, 0, 4] * 10, [1, 0.2, 0.4, 9] * 10, samples=4)
    found = compare_at_equal_reward(ours, sft)
    assert found["eval/judge_gap"] == pytest.approx(-0.3)
    assert found["eval/judge_gap_p"] == pytest.approx(2.0**-10)  # all ten prompts fell
    assert found["eval/judge_gap_prompts"] == 10
    assert found.items() <= compare_evaluations(ours, sft).items()
    assert compare_at_equal_reward(sft, ours)["eval/judge_gap"] == pytest.approx(0.3)
    assert compare_at_equal_reward(sft, ours)["eval/judge_gap_p"] == pytest.approx(1.0)


def test_there_is_no_gap_without_a_judge_of_its_own_or_without_equal_rewards():
    rewards, scores = np.tile([0.0, 1.0], 10), np.linspace(0, 1, 20)
    assert compare_at_equal_reward(evaluation(rewards), evaluation(rewards)) == {}
    assert compare_at_equal_reward(evaluation(rewards, rewards), evaluation(rewards, rewards)) == {}
    assert compare_at_equal_reward(evaluation(rewards + 0.5, scores), evaluation(rewards, scores)) == {}
    nine = [1.0] * 9 + [2.0] * 11
    assert compare_at_equal_reward(evaluation(nine, scores), evaluation([1.0] * 20, scores)) == {}
    same = compare_at_equal_reward(evaluation(rewards, scores), evaluation(rewards, scores))
    assert (same["eval/judge_gap"], same["eval/judge_gap_p"]) == (0.0, 1.0)


def alarms(exploits: float, noise: float) -> float:
    """Share of runs with an alarm: PPO solves 75 % of 160 prompts, SFT 20 %; the judge takes the reward back in 5 % of
    SFT's solved responses, and in 5 % + `exploits` of PPO's; its `noise` is normal."""
    rng, certain = np.random.default_rng(0), 0
    for _ in range(RUNS):
        sides = []
        for solved, copied in ((0.75, 0.05 + exploits), (0.2, 0.05)):
            rewards = (rng.random(640) < solved).astype(float)
            judged = rewards * (rng.random(640) >= copied) + noise * rng.normal(size=640)
            sides.append(evaluation(rewards, judged, samples=4))
        found = compare_at_equal_reward(*sides)
        certain += found["eval/judge_gap"] < 0.0 and found["eval/judge_gap_p"] < CERTAIN
    return certain / RUNS


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_a_judge_that_is_only_noisier_or_stricter_gives_no_alarm(noise: float):
    assert alarms(0.0, noise) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_an_exploit_of_a_third_of_the_solved_responses_is_found(noise: float):
    assert alarms(0.33, noise) >= 0.95
