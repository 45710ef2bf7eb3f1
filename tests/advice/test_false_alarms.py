"""How often `reward_hacked` fires: simulated runs whose judge does not change, rises, or falls at the end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppo_rlhf.advice import advise
from ppo_rlhf.evaluation import since_best as module
from ppo_rlhf.evaluation.exploitation import exploitation
from ppo_rlhf.evaluation.since_best import SCORES, TRAINED_REWARD, since_best
from tests.advice.support import config, history
from tests.evaluation.test_since_best import evaluation

pytestmark = pytest.mark.slow

PROMPTS, EVALUATIONS = 64, 12
CORRELATIONS = (0.0, 0.5, 0.9, 0.99)
ERROR = 1.0 / math.sqrt(PROMPTS)
"""Standard error of one evaluation: the noise of a prompt has deviation 1."""


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand patterns of signs are enough for 0.05 of twelve, and five times as fast."""
    monkeypatch.setattr(module, "RESAMPLES", 999)


def noisy_scores(rng: np.random.Generator, correlation: float) -> np.ndarray:
    """SFT's scores and those of each evaluation: a level for each prompt, and noise that lasts from one to the next."""
    noise = rng.normal(size=(EVALUATIONS + 1, PROMPTS))
    for now, before in zip(noise[1:], noise, strict=False):
        now *= math.sqrt(1.0 - correlation**2)
        now += correlation * before
    return rng.normal(size=PROMPTS) + noise


def is_called_hacked(judge: np.ndarray) -> bool:
    """Whether the rule fires at the end of a run with these scores, whose reward rises."""
    sft, *evaluations = (evaluation(scores, np.full(PROMPTS, 0.1 * k)) for k, scores in enumerate(judge))
    earlier = [{"eval/reward": each.rewards.mean(), SCORES: each.deciding_scores} for each in evaluations[:-1]]
    last = since_best(evaluations[-1], sft, earlier)
    last |= {"iteration": 40.0, "eval/judge_score": judge[-1].mean(), TRAINED_REWARD: 0.1}
    last |= exploitation(last, [], config(eval_interval=math.ceil(40 / EVALUATIONS)), "off")[0]
    curves = {key: [math.nan] * 3 + [value] for key, value in last.items() if key.startswith("eval/since_best")}
    return "reward_hacked" in {item.rule.name for item in advise(config(), history(curves))}


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_at_most_two_per_cent_of_runs_without_a_change_are_called_hacked(correlation: float):
    """Before, 87, 80, 69 and 62 per cent: the best of several noisy evaluations is above the last one."""
    rng = np.random.default_rng(1)
    assert np.mean([is_called_hacked(noisy_scores(rng, correlation)) for _ in range(300)]) <= 0.02


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_at_least_four_fifths_of_the_falls_of_five_standard_errors_are_found(correlation: float):
    """Of one evaluation's error, or of the pair's, whichever is smaller."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(100):
        judge = noisy_scores(rng, correlation)
        best = int(judge[:-1].mean(axis=1).argmax())
        of_the_pair = ERROR * math.sqrt(2.0 * (1.0 - correlation ** (EVALUATIONS - best)))
        judge[-1] -= 5.0 * min(ERROR, of_the_pair)
        found.append(is_called_hacked(judge))
    assert np.mean(found) >= 0.8


def test_runs_whose_judge_rises_by_two_standard_errors_are_not_called_hacked():
    """Before, 64 per cent."""
    rng = np.random.default_rng(3)
    rise = np.linspace(0.0, 2.0 * ERROR, EVALUATIONS + 1)[:, None]
    assert np.mean([is_called_hacked(noisy_scores(rng, 0.0) + rise) for _ in range(200)]) <= 0.02
