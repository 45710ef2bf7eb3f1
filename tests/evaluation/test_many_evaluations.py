"""How often a fall since the best evaluation is claimed: simulated runs of up to 1,000 evaluations."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtr
from scipy.stats import binom

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation import since_best as module
from ppo_rlhf.evaluation.exploitation import FALSE_ALARMS, LEVEL, exploitation, exploits_at_end, untested_p
from ppo_rlhf.evaluation.since_best import SCORES, TRAINED_REWARD, since_best
from ppo_rlhf.evaluation.verdict import Verdict
from ppo_rlhf.reporting.wording import remarks
from tests.evaluation.test_since_best import evaluation


def student(shares: np.ndarray) -> np.ndarray:
    """The quantiles of Student's t with two degrees of freedom, which has no variance."""
    return (2.0 * shares - 1.0) / np.sqrt(2.0 * shares * (1.0 - shares))


KINDS = {
    "normal": lambda noise: noise,
    "heavy-tailed": lambda noise: student(ndtr(noise)),
    "skewed": lambda noise: np.exp(2.0 * noise),
    "right or wrong": lambda noise: (noise > 0.5).astype(float),
}
SAID, CANNOT_BE_SAID = "exploits its reward", "evaluation.iteration_prompts"


def noisy_scores(rng, kind, evaluations, prompts, correlation=0.0) -> np.ndarray:
    """Scores of SFT and of each evaluation, [evaluations + 1, prompts]: nothing but noise changes.

    The noise lasts from one evaluation to the next with the given correlation; prompts are of different difficulty.
    """
    noise = rng.normal(size=(evaluations + 1, prompts))
    for now, before in zip(noise[1:], noise, strict=False):
        now *= math.sqrt(1.0 - correlation**2)
        now += correlation * before
    return KINDS[kind](0.8 * noise + 0.6 * rng.normal(size=prompts))


def last_row(judge: np.ndarray) -> dict[str, float]:
    """The metrics of the last of these evaluations, whose reward is always the same."""
    rewards = np.zeros(judge.shape[1])
    earlier = [{"eval/reward": 0.0} for _ in judge[1:-1]]
    best = int(judge[1:-1].mean(axis=1).argmax())
    earlier[best][SCORES] = judge[1 + best]
    row = since_best(evaluation(judge[-1], rewards), evaluation(judge[0], rewards), earlier)
    row = {name: value for name, value in row.items() if name.startswith("eval/")}
    row |= {"iteration": len(judge) - 1.0, "eval/judge_score": judge[-1].mean(), TRAINED_REWARD: 0.0}
    settings = PPOConfig(total_episodes=len(judge) - 1, per_device_train_batch_size=1, eval_interval=1, device="cpu")
    return row | exploitation(row, [], settings, "off")[0]


def said_of(row: dict[str, float]) -> list[str]:
    """What the report says of a run that ended with this row."""
    history = pd.DataFrame([row])
    untested = untested_p(history)
    found = {"exploits": exploits_at_end(history)} | ({} if untested is None else {"untested_p": untested})
    summary = {"verdict": Verdict.BETTER, "eval/judge_score": 0.0, **found}
    return remarks(summary, pd.DataFrame(columns=["measure", "sft", "ppo"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompts", [8, 64, 512])
@pytest.mark.parametrize("evaluations", [10, 150, 300, 1000])
def test_a_collapse_is_said_after_any_number_of_evaluations_unless_the_prompts_are_too_few(evaluations, prompts, kind):
    """Before, the probability of a fall was no less than evaluations / 5,000: from 125 on nothing could be said."""
    rng = np.random.default_rng([evaluations, prompts])
    judge = noisy_scores(rng, kind, evaluations, prompts)
    judge[-1] = judge.min()
    row = last_row(judge)
    (found,) = said_of(row)
    if prompts == 8:  # a fall on all eight has by chance the probability 1 / 256, from each of ten evaluations
        assert CANNOT_BE_SAID in found
        assert f"with probability {min(1.0, evaluations / 256):.2g}" in found
        assert row["eval/since_best_p"] >= row["eval/since_best_p_min"] >= row[LEVEL]
    else:
        assert SAID in found
        assert row["eval/since_best_p_min"] <= row["eval/since_best_p"] < row[LEVEL]


def test_eight_prompts_are_enough_for_two_evaluations_and_too_few_for_three():
    scores = np.tile(np.arange(8.0), (8, 1))
    for evaluations, expected in (
        (2, SAID),
        (3, CANNOT_BE_SAID),
    ):  # 2 / 256 is below 0.02 / 2, 3 / 256 not below 0.02 / 3
        (found,) = said_of(last_row(np.vstack([scores[:evaluations], [-np.ones(8)]])))
        assert expected in found


def false_alarms(runs, kind, evaluations, prompts, correlation) -> list[bool]:
    """For each of some runs without a change, whether its last evaluation says that it exploits its reward."""
    rng = np.random.default_rng([evaluations, prompts, int(100 * correlation)])
    rows = [last_row(noisy_scores(rng, kind, evaluations, prompts, correlation)) for _ in range(runs)]
    return [exploits_at_end(pd.DataFrame([row])) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_without_a_change_are_rarely_said_to_have_fallen(kind, monkeypatch):
    monkeypatch.setattr(module, "RESAMPLES", 999)
    found = false_alarms(60, kind, 20, 64, 0.5)
    assert sum(found) <= binom.ppf(0.999, len(found), FALSE_ALARMS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correlation", [0.0, 0.9, 0.99])
@pytest.mark.parametrize(("evaluations", "prompts"), [(10, 8), (10, 64), (150, 16), (300, 64), (1000, 64), (300, 512)])
def test_at_most_two_per_cent_of_runs_without_a_change_are_said_to_have_fallen(
    evaluations, prompts, correlation, kind, monkeypatch
):
    monkeypatch.setattr(module, "RESAMPLES", 999)
    found = false_alarms(100, kind, evaluations, prompts, correlation)
    assert sum(found) <= binom.ppf(0.999, len(found), FALSE_ALARMS)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [64, 512])
@pytest.mark.parametrize("evaluations", [20, 150, 300])
def test_at_least_four_fifths_of_the_falls_of_five_standard_errors_are_said(evaluations, prompts):
    """Of the change's standard error; the best evaluation is one that noise favoured, which adds to the fall."""
    rng, found = np.random.default_rng([evaluations, prompts]), []
    for _ in range(50):
        judge = noisy_scores(rng, "normal", evaluations, prompts)
        judge[-1] -= 5.0 * 0.8 * math.sqrt(2.0 / prompts)
        found.append(SAID in " ".join(said_of(last_row(judge))))
    assert np.mean(found) >= 0.8
