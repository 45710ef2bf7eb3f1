"""Win rate, interval, diversity and the eval/* metrics, against hand arithmetic, theory and a plain bootstrap."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.ppo.comparison import (
    Decided,
    before_after,
    compare_evaluations,
    distinct_n,
    sample_pairs,
    win_rate,
)
from ppo_rlhf.ppo.evaluation import PolicyEvaluation

ALWAYS = {
    *("eval/win_rate", "eval/win_rate_low", "eval/win_rate_high", "eval/reward", "eval/reward_sft", "eval/kl"),
    *("eval/response_length", "eval/distinct_2", "eval/distinct_2_sft"),
}
JUDGED = {"eval/judge_score", "eval/judge_score_sft"}


def evaluation(rewards, judge_scores=None, rates=None, completions=None, prompts=None, kl=None):
    rewards = np.asarray(rewards, dtype=float)
    return PolicyEvaluation(
        prompts=prompts or [f"prompt {row}" for row in range(len(rewards))],
        completions=completions or ["a b c"] * len(rewards),
        rewards=rewards,
        judge_scores=None if judge_scores is None else np.asarray(judge_scores, dtype=float),
        rates={name: np.asarray(values, dtype=float) for name, values in (rates or {}).items()},
        kl=np.zeros(len(rewards)) if kl is None else np.asarray(kl, dtype=float),
        lengths=np.arange(1, len(rewards) + 1),
        terminated=np.ones(len(rewards), dtype=bool),
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1, 2, 3, 0], [0, 2, 1, 5], 2.5 / 4),  # win, tie, win, loss
        ([1, 1, 1], [1, 1, 1], 0.5),
        ([1, 2], [0, 0], 1.0),
        ([0, 0], [1, 2], 0.0),
        ([-1.0], [-2.0], 1.0),
    ],
)
def test_win_rate_counts_wins_whole_and_ties_half(ours, theirs, expected):
    assert win_rate(np.array(ours), np.array(theirs), seed=0).rate == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("ours", "rate"), [(1.0, 1.0), (0.0, 0.5), (-1.0, 0.0)])
def test_interval_has_no_width_when_every_prompt_has_the_same_outcome(ours, rate):
    wins = win_rate(np.full(50, ours), np.zeros(50), seed=0)
    assert (wins.low, wins.rate, wins.high) == (rate, rate, rate)


def test_interval_with_ties_matches_the_normal_approximation_of_a_three_point_law():
    """Half wins, a quarter ties, a quarter losses: mean 0.625, variance 0.5 + 0.25 / 4 - 0.625^2 = 0.171875."""
    wins = win_rate(np.r_[np.ones(200), np.zeros(100), -np.ones(100)], np.zeros(400), seed=3, bootstrap_samples=20_000)
    half_width = 1.96 * math.sqrt(0.171875 / 400)
    assert wins.rate == 0.625
    assert wins.low == pytest.approx(0.625 - half_width, abs=0.003)
    assert wins.high == pytest.approx(0.625 + half_width, abs=0.003)


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (6, 0, 2 / 64),
        (0, 6, 2 / 64),
        (9, 1, 2 * (1 + 10) / 1024),
        (3, 3, 1.0),
    ],
)
def test_a_sign_test_worked_by_hand(wins, losses, expected):
    assert Decided(wins, losses).by_chance == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("wins", "losses"), [(17, 30), (30_000, 29_000), (100_000, 0)])
def test_the_sign_test_of_many_prompts_is_scipys(wins, losses):
    expected = binomtest(wins, wins + losses).pvalue
    assert Decided(wins, losses).by_chance == pytest.approx(expected, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([1.0], [1.0, 2.0], r"must be paired.*\(1,\) and \(2,\)"),
        ([], [], "must be paired"),
        ([float("nan")], [0.0], "must be finite"),
        ([0.0], [float("inf")], "must be finite"),
    ],
)
def test_win_rate_refuses_scores_that_cannot_be_compared(ours, theirs, message):
    with pytest.raises(DataError, match=message):
        win_rate(np.array(ours), np.array(theirs), seed=0)


@pytest.mark.parametrize(
    ("completions", "n", "expected"),
    [
        (["a b a b"], 2, 2 / 3),  # ab, ba, ab
        (["a b", "a b"], 2, 1 / 2),  # pooled over completions
        (["a b", "c d"], 2, 1.0),  # no pair across the boundary
        (["a a a"], 1, 1 / 3),
        (["a  b\n a"], 2, 1.0),  # any whitespace splits
        (["", "a"], 2, 0.0),  # nothing long enough
    ],
)
def test_distinct_n_is_the_share_of_different_ngrams(completions, n, expected):
    assert distinct_n(completions, n) == pytest.approx(expected, abs=1e-12)


def test_metrics_with_a_judge_have_exactly_the_documented_keys_and_the_judge_decides():
    policy = evaluation([0, 0], judge_scores=[2, 2], rates={"grammatical_rate": [1, 0]}, kl=[1, 3])
    sft = evaluation([9, 9], judge_scores=[1, 2], rates={"grammatical_rate": [1, 1]})
    metrics = compare_evaluations(policy, sft, seed=0, bootstrap_samples=200)
    assert set(metrics) == ALWAYS | JUDGED | {"eval/grammatical_rate", "eval/grammatical_rate_sft"}
    assert metrics["eval/win_rate"] == 0.75  # a win and a tie by the judge, though the reward lost both
    assert metrics["eval/judge_score"] == 2.0
    assert metrics["eval/judge_score_sft"] == 1.5
    assert metrics["eval/reward"] == 0.0
    assert metrics["eval/reward_sft"] == 9.0
    assert metrics["eval/kl"] == 2.0
    assert metrics["eval/response_length"] == 1.5
    assert metrics["eval/grammatical_rate"] == 0.5
    assert metrics["eval/grammatical_rate_sft"] == 1.0
    assert all(type(value) is float for value in metrics.values())


def test_metrics_without_a_judge_leave_its_keys_out_and_the_reward_decides():
    metrics = compare_evaluations(evaluation([1, 1]), evaluation([0, 2]), seed=0, bootstrap_samples=200)
    assert set(metrics) == ALWAYS
    assert metrics["eval/win_rate"] == 0.5


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (evaluation([1, 1], prompts=["other", "prompts"]), "same prompts"),
        (evaluation([1, 1], judge_scores=[1, 1]), "same functions"),
        (evaluation([1, 1], rates={"polite_rate": [1, 1]}), "same functions"),
    ],
)
def test_evaluations_of_different_things_are_not_compared(other, message):
    for compare in (
        lambda a, b: compare_evaluations(a, b, seed=0, bootstrap_samples=200),
        before_after,
        lambda a, b: sample_pairs(a, b, count=1, seed=0),
    ):
        with pytest.raises(DataError, match=message):
            compare(evaluation([1, 1]), other)


def test_table_before_and_after_has_both_policies_measures():
    policy = evaluation([1, 3], judge_scores=[1, 1], completions=["a a", "a a"], kl=[2, 4])
    sft = evaluation([0, 0], judge_scores=[0, 1], completions=["a b", "c d"])
    table = before_after(policy, sft).set_index("measure")
    assert table.loc["judge_score"].tolist() == [0.5, 1.0]
    assert table.loc["reward"].tolist() == [0.0, 2.0]
    assert table.loc["kl"].tolist() == [0.0, 3.0]
    assert table.loc["distinct_1"].tolist() == [1.0, 0.25]
    assert table.loc["distinct_2"].tolist() == [1.0, 0.5]
    assert table.loc["truncated_fraction"].tolist() == [0.0, 0.0]


def test_sample_pairs_hold_random_rows_then_the_widest_wins_and_losses_without_repeats():
    margins = np.arange(-10.0, 11.0)
    completions = [f"answer {row}" for row in range(21)]
    policy = evaluation(margins, completions=completions, kl=margins)
    table = sample_pairs(policy, evaluation(np.zeros(21)), count=4, seed=0)
    assert table["chosen"].tolist() == ["drawn at random"] * 4 + ["widest win"] * 3 + ["widest loss"] * 3
    assert table["prompt"].is_unique
    drawn = set(table["ppo_score"][:4])
    assert table["ppo_score"][4:7].tolist() == sorted(set(range(1, 11)) - drawn, reverse=True)[:3]
    assert table["ppo_score"][7:].tolist() == sorted(set(range(-10, 0)) - drawn)[:3]
    outcomes = {1.0: "win", 0.0: "tie", -1.0: "loss"}
    assert table["outcome"].tolist() == [outcomes[sign] for sign in np.sign(table["ppo_score"])]
    rows = [int(text.split()[1]) for text in table["ppo_response"]]
    assert table["ppo_kl"].tolist() == [margins[row] for row in rows]  # every column is of the same prompt
    few = sample_pairs(evaluation([1, 0, 2]), evaluation([0, 0, 9]), count=50, seed=0)
    assert sorted(few["prompt"]) == ["prompt 0", "prompt 1", "prompt 2"]
