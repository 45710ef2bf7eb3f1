"""Two policies compared by people: the interval covers, the verdict needs ten pairs, and no name is told."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from ppo_rlhf.people.win_rate import compare_by_people
from ppo_rlhf.reporting.wording import say_result_by_people


def answers(pairs: int, win: float, tie: float, seed: int) -> list[dict[str, float]]:
    drawn = random.Random(seed)
    return [{"anna": drawn.choices([1.0, 0.5, 0.0], [win, tie, 1.0 - win - tie])[0]} for _ in range(pairs)]


@pytest.mark.parametrize(("win", "tie"), [(0.5, 0.0), (0.6, 0.2), (0.9, 0.05)])
def test_the_interval_of_200_answers_covers_the_known_preference(win: float, tie: float) -> None:
    true, rounds = win + tie / 2, 600
    covered = 0
    for seed in range(rounds):
        metrics = compare_by_people(answers(200, win, tie, seed))["metrics"]
        covered += metrics["human/win_rate_low"] <= true <= metrics["human/win_rate_high"]
    assert 0.925 <= covered / rounds <= 0.985  # 0.95 ± 2.8 standard errors of 600 rounds


def test_a_winner_needs_ten_answered_pairs_and_unanswered_ones_do_not_count() -> None:
    nine: list[dict[str, float]] = [{"a": 1.0}] * 9 + [{}] * 30
    few = compare_by_people(nine)
    assert few["verdict"] == "too_few_prompts"
    assert say_result_by_people(few).startswith("Too few answered pairs to tell PPO and SFT apart, decided by one")
    ten = compare_by_people([*nine, {"a": 1.0}])
    assert (ten["verdict"], ten["answered"], ten["pairs"]) == ("better", 10, 40)
    lost = compare_by_people([{"a": 0.0}] * 10, ours="new", theirs="old")
    assert lost["verdict"] == "worse"
    assert say_result_by_people(lost).startswith("new loses to old, decided by one person on 10 pairs: win rate 0.0% (")
    even = compare_by_people([{"a": 1.0}] * 10 + [{"a": 0.0}] * 10)
    assert even["verdict"] == "no_clear_difference"
    assert say_result_by_people(even).startswith("No clear difference between PPO and SFT, decided by one person")
    nobody = compare_by_people([{}])
    assert nobody["verdict"] is None
    assert say_result_by_people(nobody) == "Nobody has compared PPO and SFT yet."


def test_a_pair_that_several_people_answered_is_worth_their_mean_and_each_has_a_rate() -> None:
    worths = [{"anna": 1.0, "ben": 0.0}, {"anna": 1.0}, {"ben": 0.5}, {}]
    found = compare_by_people(worths, agreement=0.25)
    assert found["metrics"]["human/win_rate"] == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert [(row["pairs"], row["win_rate"]) for row in found["by_person"]] == [(2, 0.25), (2, 1.0)]
    assert (found["people"], found["metrics"]["human/agreement"]) == (2, 0.25)
    told = json.dumps(found) + say_result_by_people({**found, "judge": None})
    assert "anna" not in told
    assert "ben" not in told


def test_pairs_of_one_prompt_are_one_in_intervals_and_verdict() -> None:
    # each of 12 prompts answered by ten pairs that go one way says no more than one pair of it
    worths = [{"a": float(number % 3 > 0)} for number in range(12)]
    once = compare_by_people(worths, [1.0] * 12, prompts=[f"p{number}" for number in range(12)])
    often = compare_by_people(worths * 10, [1.0] * 120, prompts=[f"p{number}" for number in range(12)] * 10)
    for name in ("win_rate", "judge_agreement"):
        for end in ("", "_low", "_high"):
            assert often["metrics"][f"human/{name}{end}"] == pytest.approx(once["metrics"][f"human/{name}{end}"])
    assert often["by_person"][0]["low"] == pytest.approx(once["by_person"][0]["low"])
    assert (often["verdict"], often["answered"], often["prompts"]) == (once["verdict"], 120, 12)
    assert "decided by one person on 120 pairs of 12 prompts: " in say_result_by_people({**often, "judge": "j"})
    few = compare_by_people([{"a": 1.0}] * 90, prompts=[f"p{number % 9}" for number in range(90)])
    assert few["verdict"] == "too_few_prompts"
    unanswered = compare_by_people([{"a": 1.0}, {}, {"a": 0.0}], prompts=["p", "p", "q"])
    assert (unanswered["metrics"]["human/win_rate"], unanswered["prompts"]) == (0.5, 2)


def test_the_judge_agrees_where_it_prefers_what_people_prefer_and_half_on_its_ties() -> None:
    worths: list[dict[str, float]] = [{"a": 1.0}, {"a": 1.0}, {"a": 0.0}, {"a": 0.0}, {"a": 0.5}, {}]
    found = compare_by_people(worths, [1.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    assert found["metrics"]["human/judge_agreement"] == pytest.approx(2.5 / 4)
    assert found["judged"] == 4
    assert "human/judge_agreement" not in compare_by_people(worths)["metrics"]


def test_the_interval_over_people_covers_people_whose_tastes_differ() -> None:
    """Five people judge 120 pairs; each person's log-odds for ours are normal around 0.3 with deviation 1."""
    drawn, rounds, covered, by_pairs = np.random.default_rng(0), 300, 0, 0
    true = float(np.mean(1 / (1 + np.exp(-drawn.normal(0.3, 1.0, 1_000_000)))))
    for _ in range(rounds):
        tastes = 1 / (1 + np.exp(-drawn.normal(0.3, 1.0, 5)))
        wins = drawn.random((120, 5)) < tastes
        found = compare_by_people([dict(zip("abcde", map(float, row), strict=True)) for row in wins])["metrics"]
        covered += found["human/win_rate_over_people_low"] <= true <= found["human/win_rate_over_people_high"]
        by_pairs += found["human/win_rate_low"] <= true <= found["human/win_rate_high"]
    assert 0.91 <= covered / rounds <= 0.99  # 0.95 ± 3 standard errors
    assert by_pairs / rounds < 0.7  # of these people only


def test_with_fewer_than_five_people_there_is_no_interval_over_people() -> None:
    four = compare_by_people([dict.fromkeys("abcd", 1.0)] * 12)
    assert "human/win_rate_over_people" not in four["metrics"]
    assert "Verdict and interval hold for these people only." in say_result_by_people(four)
    # by hand: rates 0, 0.25, 0.5, 0.75, 1, of mean 0.5 and deviation 0.3953; t(4, 0.975) = 2.776
    rates = dict(zip("abcde", (0.0, 0.25, 0.5, 0.75, 1.0), strict=True))
    five = compare_by_people([rates] * 12)
    ends = [five["metrics"][f"human/win_rate_over_people{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([0.5, 0.5 - 2.776 * 0.3953 / 5**0.5, 0.5 + 2.776 * 0.3953 / 5**0.5], abs=1e-3)
    assert "Over people like these, the win rate is 50.0% (95% interval 0.9% to 99.1%)." in say_result_by_people(five)


def test_the_result_in_words() -> None:
    found = compare_by_people([{"a": 1.0, "b": 1.0, "c": 1.0}] * 120, [1.0] * 120, agreement=1.0)
    assert say_result_by_people({**found, "judge": "the judge m:f"}).startswith(
        "PPO beats SFT, decided by 3 people on 120 pairs: win rate 100.0% (95% interval "
    )
