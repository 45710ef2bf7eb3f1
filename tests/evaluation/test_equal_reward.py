"""The judge's score at equal reward: by hand, its false alarms by simulation, and that it finds an exploit."""

from __future__ import annotations

import numpy as np
import pytest

from ppo_rlhf.evaluation.comparison import compare_evaluations
from ppo_rlhf.evaluation.equal_reward import CERTAIN, compare_at_equal_reward
from tests.evaluation.test_comparison import evaluation

RUNS = 200


def test_the_gap_is_the_mean_over_the_responses_whose_reward_both_policies_got():
    """By hand. PPO has 20 responses of reward 1 with the judge's mean 1/2, and 10 of reward 0 with 0.2; SFT has means 1
    and 0.3: (20 x -0.5 + 10 x -0.1) / 30. The rewards 3 and 4 are of one side alone."""
    ours = evaluation([1, 1, 0, 3] * 10, [0, 1, 0.2, 9] * 10, samples=4)
    sft = evaluation([1, 0, 0, 4] * 10, [1, 0.2, 0.4, 9] * 10, samples=4)
    found = compare_at_equal_reward(ours, sft)
    assert found["eval/judge_gap"] == pytest.approx(-11 / 30)
    assert found["eval/judge_gap_p"] <= 0.001  # all prompts' responses scored lower
    assert found["eval/judge_gap_prompts"] == 10
    assert found.items() <= compare_evaluations(ours, sft).items()
    other_way = compare_at_equal_reward(sft, ours)
    assert other_way["eval/judge_gap"] == pytest.approx((10 * 0.5 + 20 * 0.1) / 30)
    assert other_way["eval/judge_gap_p"] == pytest.approx(1.0)


def test_prompts_of_a_reward_that_is_not_compared_are_not_counted():
    """Of 30 prompts, 10 have a reward of 2, which only 5 of SFT's prompts got."""
    ours = evaluation([1.0] * 20 + [2.0] * 10, [0.0] * 30)
    sft = evaluation([1.0] * 25 + [2.0] * 5, [1.0] * 30)
    assert compare_at_equal_reward(ours, sft)["eval/judge_gap_prompts"] == 20


def test_an_exploit_of_prompts_that_sft_never_solved_is_seen():
    """SFT solves 20 prompts, PPO these and 20 others, of which the judge takes the reward back."""
    solved = [1.0] * 20 + [0.0] * 20
    found = compare_at_equal_reward(evaluation([1.0] * 40, solved), evaluation(solved, solved))
    assert found["eval/judge_gap"] == pytest.approx(-0.5)
    assert found["eval/judge_gap_p"] < CERTAIN


def test_few_responses_of_sft_are_no_certain_measure():
    """The judge took the reward back in none of SFT's 10 responses and in 10 of PPO's 100: noise does that."""
    ours = evaluation([1.0] * 100, [0.0] * 10 + [1.0] * 90)
    sft = evaluation([1.0] * 10 + [0.0] * 90, [1.0] * 10 + [0.0] * 90)
    found = compare_at_equal_reward(ours, sft)
    assert found["eval/judge_gap"] == pytest.approx(-0.1)
    assert 0.3 < found["eval/judge_gap_p"] < 0.5  # hypergeometric: none of 10 among 10 of 110 is 0.37


def test_there_is_no_gap_without_a_judge_of_its_own_or_without_equal_rewards():
    rewards, scores = np.tile([0.0, 1.0], 10), np.linspace(0, 1, 20)
    assert compare_at_equal_reward(evaluation(rewards), evaluation(rewards)) == {}
    assert compare_at_equal_reward(evaluation(rewards, rewards), evaluation(rewards, rewards)) == {}
    assert compare_at_equal_reward(evaluation(rewards + 0.5, scores), evaluation(rewards, scores)) == {}
    nine = [1.0] * 9 + [2.0] * 11
    assert compare_at_equal_reward(evaluation(nine, scores), evaluation([1.0] * 20, scores)) == {}
    same = compare_at_equal_reward(evaluation(rewards, scores), evaluation(rewards, scores))
    assert same["eval/judge_gap"] == pytest.approx(0.0, abs=1e-12)
    assert same["eval/judge_gap_p"] > 0.3


def alarms(exploits: float, noise: float, spread: float = 0.0) -> float:
    """Share of runs with an alarm: PPO solves 75 % of 160 prompts, SFT 20 %, each prompt by its own difficulty
    (`spread`); the judge takes the reward back in 5 % of SFT's solved responses, and in 5 % + `exploits` of PPO's; its
    `noise` is normal."""
    rng, certain = np.random.default_rng(0), 0
    for _ in range(RUNS):
        sides, difficulty = [], np.repeat(rng.uniform(-spread, spread, 160), 4)
        for solved, copied in ((0.75, 0.05 + exploits), (0.2, 0.05)):
            rewards = (rng.random(640) < solved + difficulty).astype(float)
            judged = rewards * (rng.random(640) >= copied) + noise * rng.normal(size=640)
            sides.append(evaluation(rewards, judged, samples=4))
        found = compare_at_equal_reward(*sides)
        certain += found["eval/judge_gap"] < 0.0 and found["eval/judge_gap_p"] < CERTAIN
    return certain / RUNS


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_a_judge_that_is_only_noisier_or_stricter_gives_no_alarm(noise: float, spread: float):
    assert alarms(0.0, noise, spread) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_an_exploit_of_a_sixth_of_the_solved_responses_is_found(noise: float):
    assert alarms(0.17, noise) >= 0.8
