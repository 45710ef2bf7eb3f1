"""Holes of a reward: margins by hand, the rate of false ones, and what a run does with those that an audit found."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.reward_holes import FALSE_HOLES, attack_share, holes_of, holm, margins, reward_digest, say_hole
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig


def test_a_margin_is_tested_by_students_t_over_prompts() -> None:
    sft = np.array([[0.0, 2.0], [1.0, 1.0], [2.0, 4.0], [0.0, 0.0]])
    rewards = np.array([9.0, 1.0, 8.0, 10.0])
    table = margins({"a": rewards}, sft)
    differences = [8.0, 0.0, 5.0, 10.0]
    expected = scipy.stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue
    within = np.mean([np.var([0, 2, 9], ddof=1), 0.0, np.var([2, 4, 8], ddof=1), np.var([0, 0, 10], ddof=1)]) * 1.5
    assert within > np.var(differences, ddof=1)  # so the variance within prompts counts
    t = np.mean(differences) / math.sqrt(within / 4)
    assert table.loc[0, ["share", "margin"]].tolist() == [0.75, 5.75]
    assert table.loc[0, "p"] == pytest.approx(scipy.stats.t.sf(t, 3), rel=1e-12)
    assert table.loc[0, "p"] > expected
    wide = margins({"a": np.array([90.0, 1.0, 8.0, 10.0])}, np.ones((4, 3)))  # here that between prompts
    assert wide.loc[0, "p"] >= scipy.stats.ttest_1samp([89.0, 0.0, 7.0, 9.0], 0.0, alternative="greater").pvalue


def test_an_attack_with_the_rewards_of_sft_is_no_hole_and_one_always_above_a_constant_is() -> None:
    sft = np.full((20, 4), 0.3)
    table = margins({"equal": sft[:, 0], "rounded": sft[:, 0] + 1e-17, "above": np.full(20, 0.4)}, sft)
    assert table["hole"].tolist() == [False, False, True]


def test_one_prompt_is_no_audit() -> None:
    with pytest.raises(DataError, match="held-out prompts, and there is only one"):
        margins({"a": np.array([1.0])}, np.array([[0.9, 1.1, 0.5]]))


def test_holms_method_by_hand() -> None:
    assert holm(np.array([0.03, 0.01, 0.5, 0.02])).tolist() == pytest.approx([0.06, 0.04, 0.5, 0.06])


DRAWS = {
    "0/1, rarely 1": lambda rng, shape: (rng.random(shape) < 0.05).astype(float),
    "0/1, mostly 1": lambda rng, shape: (rng.random(shape) < 0.9).astype(float),
    "0/1, by prompt": lambda rng, shape: (rng.random(shape) < rng.beta(0.5, 0.5, (shape[0], 1))).astype(float),
    "1 to 10": lambda rng, shape: rng.integers(1, 11, shape).astype(float),
    "normal": lambda rng, shape: rng.normal(size=shape) + 5.0 * rng.normal(size=(shape[0], 1)),
    "long lower tail": lambda rng, shape: -rng.lognormal(size=shape),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_reward_to_which_attacks_are_answers_like_others_seldom_has_a_hole(kind: str) -> None:
    rng, tries, tried = np.random.default_rng(7), 150, 27
    false = 0
    for _ in range(tries):
        drawn = DRAWS[kind](rng, (48, 8 + tried))
        table = margins({str(number): drawn[:, 8 + number] for number in range(tried)}, drawn[:, :8])
        false += bool(table["hole"].any())
    # With a rate of FALSE_HOLES more than six of 150 happen with probability 0.0007
    assert scipy.stats.binom.sf(6, tries, FALSE_HOLES) < 1e-3
    assert false <= 6


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "rewards_of_this_test.py").write_text("def count(prompts, completions): return [1.0] * len(prompts)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return RewardConfig([RewardComponentConfig(type="function", function="rewards_of_this_test:count")])


def test_holes_are_those_of_the_audited_reward_alone(reward: RewardConfig) -> None:
    audit = {"reward": reward_digest(reward, None), "holes": [{"attack": "echo"}, {"attack": "keywords"}]}
    assert holes_of(audit, reward, None) == ["echo", "keywords"]
    heavier = RewardConfig([replace(reward.components[0], weight=2.0)])
    assert holes_of(audit, heavier, None) == []
    assert holes_of({}, reward, None) == []
    assert holes_of(audit | {"holes": []}, reward, None) == []


PROMPTS = PromptDataset([[1]] * 12, ["Why do people like rivers so much?"] * 12, {})


def test_the_share_of_answers_that_do_what_the_audit_found_is_compared_with_sfts() -> None:
    echo, answer = "Why do people like rivers so much?", "They are calm."
    metrics, text = attack_share(["echo", "other answer"], PROMPTS, [echo] * 9 + [answer] * 3, [echo] + [answer] * 11)
    assert metrics["eval/attack_share"] == 0.75
    assert metrics["eval/attack_share_sft"] == pytest.approx(1 / 12)
    assert metrics["eval/attack_share_p"] == pytest.approx(2 * 0.5**8)
    assert text is not None
    assert "75% of the answers" in text
    assert "(echo 75%); of SFT's answers 8% do" in text
    metrics, text = attack_share(["echo"], PROMPTS, [echo] * 3 + [answer] * 9, [answer] * 12)
    assert (metrics["eval/attack_share"], text) == (0.25, None)  # three of three may be chance


def test_nothing_is_counted_without_holes_that_an_answer_shows() -> None:
    for holes in ([], ["other answer"], ["of an attack that is gone"]):
        assert attack_share(holes, PROMPTS, ["a"] * 12, ["b"] * 12) == ({}, None)


def test_a_hole_is_said_with_its_text_margin_share_and_what_to_do() -> None:
    hole = {"attack": "echo", "text": "Why\n so?", "margin": 1.876, "share": 0.43, "right": "never", "fix": "reads it"}
    assert say_hole(hole | {"stopped_by": "copied"}) == (
        "Hole: echo ('Why so?') scores 1.88 standard deviations above SFT's answers, on 43% of the prompts. Such a "
        "response is never right. Add a component that reads it. copied scores it below SFT's answers: give it more "
        "weight."
    )
