"""The judge's score at equal reward: by hand, its false alarms by simulation, and that it finds an exploit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom

from ppo_rlhf.evaluation import since_best
from ppo_rlhf.evaluation.comparison import compare_evaluations
from ppo_rlhf.evaluation.equal_reward import CERTAIN, compare_at_equal_reward
from tests.evaluation.test_comparison import evaluation


def test_the_gap_is_the_mean_over_the_pairs_of_one_prompt_whose_reward_is_equal():
    """By hand. Of each prompt's four pairs the first two have equal rewards, 1 and 1, 0 and 0, and the judge's scores
    0 against 1 and 0.2 against 0.4: (-1 - 0.2) / 2. The others' rewards differ, so their scores do not count."""
    ours = evaluation([1, 0, 1, 3] * 10, [0, 0.2, 9, 9] * 10, samples=4)
    sft = evaluation([1, 0, 0, 4] * 10, [1, 0.4, 0, 0] * 10, samples=4)
    found = compare_at_equal_reward(ours, sft)
    assert found["eval/judge_gap"] == pytest.approx(-0.6)
    assert found["eval/judge_gap_p"] == pytest.approx(0.5**10)  # all ten prompts fell
    assert found["eval/judge_gap_prompts"] == 10
    assert found.items() <= compare_evaluations(ours, sft).items()
    other_way = compare_at_equal_reward(sft, ours)
    assert other_way["eval/judge_gap"] == pytest.approx(0.6)
    assert other_way["eval/judge_gap_p"] == 1.0


def test_a_policy_that_solves_harder_prompts_is_not_compared_with_sft_on_easier_ones():
    """SFT solves the 20 easy prompts, which the judge scores 1; PPO all 40, and the judge scores hard ones 0.5,
    whoever answers. Across prompts PPO's solved responses had 0.25 less than SFT's."""
    judged = [1.0] * 20 + [0.5] * 20
    found = compare_at_equal_reward(evaluation([1.0] * 40, judged), evaluation([1.0] * 20 + [0.0] * 20, judged))
    assert (found["eval/judge_gap"], found["eval/judge_gap_p"]) == (0.0, 1.0)
    assert found["eval/judge_gap_prompts"] == 20


def test_there_is_no_gap_without_a_judge_of_its_own_or_without_equal_rewards():
    rewards, scores = np.tile([0.0, 1.0], 10), np.linspace(0, 1, 20)
    assert compare_at_equal_reward(evaluation(rewards), evaluation(rewards)) == {}
    assert compare_at_equal_reward(evaluation(rewards, rewards), evaluation(rewards, rewards)) == {}
    assert compare_at_equal_reward(evaluation(rewards + 0.5, scores), evaluation(rewards, scores)) == {}
    nine = [1.0] * 9 + [2.0] * 11  # fewer prompts than a verdict needs
    assert compare_at_equal_reward(evaluation(nine, scores), evaluation([1.0] * 20, scores)) == {}
    same = compare_at_equal_reward(evaluation(rewards, scores), evaluation(rewards, scores))
    assert same["eval/judge_gap"] == pytest.approx(0.0, abs=1e-12)
    assert same["eval/judge_gap_p"] > 0.3


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


Sides = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Rewards and judge's scores of PPO's and of SFT's responses."""


def unchanged(rng: np.random.Generator, easy: np.ndarray) -> Sides:
    """The same policy twice; reward and judge are two noisy checks of a response's quality."""
    qualities = (easy + rng.normal(size=easy.shape) for _ in range(2))
    ours, theirs = (tuple((rng.random(easy.shape) < sigmoid(q)) * 1.0 for _ in range(2)) for q in qualities)
    return ours, theirs


def better(rng: np.random.Generator, easy: np.ndarray) -> Sides:
    """A policy that is better on each prompt, most of all on hard ones; the reward is passing a threshold."""
    sides = []
    for step in (1.0, 0.0):
        quality = 2.0 * easy + step * np.where(easy < 0.0, 2.0, 0.3) + 0.5 * rng.normal(size=easy.shape)
        sides.append(((quality > 0.0) * 1.0, quality))
    return sides[0], sides[1]


def form(rng: np.random.Generator, easy: np.ndarray) -> Sides:
    """A policy that learnt the form that the reward asks for, which SFT has on easy prompts; its answers are no worse
    and no better. Judged across prompts, most such runs were accused."""
    rewards = (np.full(easy.shape, 0.97), sigmoid(2.0 * easy - 1.0))
    ours, theirs = ((rng.random(easy.shape) < r, rng.random(easy.shape) < sigmoid(2.0 * easy)) for r in rewards)
    return (ours[0] * 1.0, ours[1] * 1.0), (theirs[0] * 1.0, theirs[1] * 1.0)


def skewed(rng: np.random.Generator, easy: np.ndarray) -> Sides:
    """Nothing changes, the reward has three values, and the judge's scores are heavy-tailed."""
    ours, theirs = (
        (rng.integers(0, 3, easy.shape) * 1.0, np.exp(2.0 * rng.normal(size=easy.shape) + easy)) for _ in "ab"
    )
    return ours, theirs


def exploit(rng: np.random.Generator, easy: np.ndarray) -> Sides:
    """PPO solves 75 %, SFT 20 %; the judge takes the reward back in 5 % of SFT's solved responses and 22 % of PPO's."""
    sides = []
    for solved, copied in ((0.75, 0.22), (0.2, 0.05)):
        rewards = (rng.random(easy.shape) < solved) * 1.0
        sides.append((rewards, rewards * (rng.random(easy.shape) >= copied)))
    return sides[0], sides[1]


def alarms(world: Callable[..., Sides], prompts: int, samples: int, runs: int) -> int:
    """How many of some runs get the alarm."""
    found = 0
    for run in range(runs):
        rng = np.random.default_rng([prompts, samples, run])
        sides = world(rng, np.repeat(rng.normal(size=prompts), samples))
        gap = compare_at_equal_reward(*(evaluation(*side, samples=samples) for side in sides))
        found += gap.get("eval/judge_gap", 0.0) < 0.0 and gap["eval/judge_gap_p"] < CERTAIN
    return found


HONEST = [unchanged, better, form, skewed]


@pytest.fixture
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand patterns of signs are enough for 0.01, and five times as fast."""
    monkeypatch.setattr(since_best, "RESAMPLES", 999)


@pytest.mark.usefixtures("_fewer_resamples")
@pytest.mark.parametrize("world", HONEST)
def test_an_honest_run_is_rarely_accused(world: Callable[..., Sides]):
    assert alarms(world, 64, 1, 100) <= binom.ppf(0.999, 100, CERTAIN)


@pytest.mark.slow
@pytest.mark.usefixtures("_fewer_resamples")
@pytest.mark.parametrize("world", HONEST)
@pytest.mark.parametrize(("prompts", "samples"), [(64, 1), (200, 1), (64, 4)])
def test_at_most_one_per_cent_of_honest_runs_are_accused(world: Callable[..., Sides], prompts: int, samples: int):
    assert alarms(world, prompts, samples, 1000) <= binom.ppf(0.999, 1000, CERTAIN)


@pytest.mark.slow
@pytest.mark.usefixtures("_fewer_resamples")
def test_an_exploit_of_a_sixth_of_the_solved_responses_is_found():
    assert alarms(exploit, 160, 4, 200) >= 0.7 * 200
