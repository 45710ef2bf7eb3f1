"""Two policies compared by people, who correct the judge: the verdict needs ten pairs, and no name is told."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from scipy.stats import beta, binom, fisher_exact

from ppo_rlhf.core.statistics import corrected_win_rate
from ppo_rlhf.people.win_rate import _fisher, compare_by_people, favours
from ppo_rlhf.reporting.wording import say_result_by_people


def answers(pairs: int, win: float, tie: float, seed: int) -> list[dict[str, float]]:
    drawn = random.Random(seed)
    return [{"anna": drawn.choices([1.0, 0.5, 0.0], [win, tie, 1.0 - win - tie])[0]} for _ in range(pairs)]


@pytest.mark.parametrize(
    ("win", "tie"),
    [pytest.param(0.5, 0.0, marks=pytest.mark.slow), (0.6, 0.2), pytest.param(0.9, 0.05, marks=pytest.mark.slow)],
)
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
    for name in ("win_rate", "win_rate_low", "win_rate_high", "judge_win_rate"):
        assert often["metrics"][f"human/{name}"] == pytest.approx(once["metrics"][f"human/{name}"])
    assert often["by_person"][0]["low"] == pytest.approx(once["by_person"][0]["low"])
    assert (often["verdict"], often["answered"], often["prompts"]) == (once["verdict"], 120, 12)
    words = say_result_by_people({**often, "judge": "j", "favours": []})
    assert "by the answers of one person on 120 pairs of 12 prompts " in words
    few = compare_by_people([{"a": 1.0}] * 90, prompts=[f"p{number % 9}" for number in range(90)])
    assert few["verdict"] == "too_few_prompts"
    unanswered = compare_by_people([{"a": 1.0}, {}, {"a": 0.0}], prompts=["p", "p", "q"])
    assert (unanswered["metrics"]["human/win_rate"], unanswered["prompts"]) == (0.5, 2)


def test_the_judge_of_more_pairs_is_corrected_by_the_answers_to_some() -> None:
    # two prompts of four pairs with answers are worth 1/2 and 1 to people, 1 and 1/2 to the judge; two others 1 and 0
    worths: list[dict[str, float]] = [{"a": 1.0}, {"a": 0.0}, {"a": 1.0}, {"a": 1.0, "b": 1.0}, {}, {}, {}]
    prompts, judged = [*"ppqqrrs"], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    found = compare_by_people(worths, judged, prompts=prompts)
    rates = [found["metrics"][f"human/win_rate{end}"] for end in ("", "_low", "_high")]
    assert rates == pytest.approx(corrected_win_rate([0.5, 1.0], [1.0, 0.5], [1.0, 0.0]))
    assert found["metrics"]["human/judge_win_rate"] == pytest.approx((1.0 + 0.5 + 1.0 + 0.0) / 4)
    assert (found["pairs"], found["answered"], found["prompts"]) == (7, 4, 2)
    alone = compare_by_people(worths, prompts=prompts)["metrics"]
    assert alone["human/win_rate"] == 0.75
    assert "human/judge_win_rate" not in alone


def test_an_unanswered_pair_of_an_answered_prompt_corrects_nothing() -> None:
    worths: list[dict[str, float]] = [*([{"a": 1.0}, {"a": 0.0}] * 10), {}]
    prompts, judged = [f"p{row}" for row in range(20)] + ["p0"], [1.0] * 21
    assert compare_by_people(worths, judged, prompts=prompts)["metrics"]["human/win_rate"] == 0.5
    rates = [compare_by_people(each, judged[: len(each)])["metrics"] for each in (worths[:20],)]
    of_all = compare_by_people(worths, judged, prompts=prompts)["metrics"]
    assert of_all["human/win_rate_low"] == rates[0]["human/win_rate_low"]


def test_a_judge_gives_a_verdict_where_the_answers_alone_are_too_few() -> None:
    """Of 40 answers 25 prefer ours: no clear difference. The judge, right on 39 of 40, says the same of 400 more."""
    worths: list[dict[str, float]] = [{"a": float(row < 25)} for row in range(40)]
    judged = [float(row < 26) for row in range(40)] + [float(row % 8 < 5) for row in range(400)]
    assert compare_by_people(worths)["verdict"] == "no_clear_difference"
    found = compare_by_people([*worths, *([{}] * 400)], judged)
    assert found["verdict"] == "better"
    assert compare_by_people([*worths[:9], *([{}] * 400)], judged[:9] + judged[40:])["verdict"] == "too_few_prompts"
    # the judge of which half the verdicts for ours are wrong
    biased = compare_by_people([*worths, *([{}] * 400)], [1.0] * 440)
    assert (biased["verdict"], biased["metrics"]["human/judge_win_rate"]) == ("no_clear_difference", 1.0)
    words = say_result_by_people({**found, "judge": "the judge m:f", "favours": ["longer answers", "PPO's answers"]})
    rate, low, high = (100 * found["metrics"][f"human/win_rate{end}"] for end in ("", "_low", "_high"))
    assert words.startswith(
        "PPO beats SFT: the judge m:f says 62.7% on 440 pairs, corrected by the answers of one person on 40 pairs "
        f"{rate:.1f}% (95% interval {low:.1f}% to {high:.1f}%); the judge favours longer answers; the judge favours "
        "PPO's answers. Verdict and interval hold for this person only."
    )


LENGTH = ("longer answers", "shorter answers")


@pytest.mark.parametrize(("by_length", "expected"), [(1, ["longer answers"]), (-1, ["shorter answers"]), (0, [])])
def test_a_judge_that_goes_by_length_is_said_to(by_length: int, expected: list[str]) -> None:
    rng = np.random.default_rng(3)
    people, longer = rng.random(60) < 0.6, rng.choice([-1, 1], 60)
    by_trait = longer * by_length > 0
    judged = np.where(rng.random(60) < (0.4 if by_length else 0.0), by_trait, people)
    assert favours(people.astype(float).tolist(), judged.astype(float).tolist(), {LENGTH: longer.tolist()}) == expected


def test_pairs_that_people_find_equal_do_not_say_what_a_judge_favours() -> None:
    people, judged, longer = [1.0, 0.0] * 20, [1.0, 0.0] * 20, [1, 1, -1, -1] * 10
    ties = [0.5] * 40
    assert favours([*people, *ties], [*judged, *[1.0] * 40], {LENGTH: [*longer, *[-1] * 40]}) == []


@pytest.mark.parametrize("counts", [(3, 7, 9, 1), (5, 0, 3, 3), (0, 0, 4, 4), (10, 10, 0, 2)])
def test_the_exact_test_is_that_of_scipy(counts: tuple[int, int, int, int]) -> None:
    right, wrong, others_right, others_wrong = counts
    table = [[wrong, right], [others_wrong, others_right]]
    assert _fisher(*counts) == pytest.approx(fisher_exact(table, alternative="greater").pvalue)


@pytest.mark.parametrize("liked", [0.5, 0.9])
def test_noise_does_not_say_that_a_judge_favours_anything(liked: float) -> None:
    """People like the longer response; a judge that is wrong at random then prefers it less often than they do."""
    rng, said = np.random.default_rng(0), 0
    for _ in range(400):
        longer, other = rng.choice([-1, 0, 1], (2, 40))
        people = (rng.random(40) < liked) == (longer >= 0)
        judged = np.where(rng.random(40) < 0.75, people, ~people)
        traits = {LENGTH: longer.tolist(), ("x", "y"): other.tolist(), ("ours", "theirs"): [1] * 40}
        said += favours(people.astype(float).tolist(), judged.astype(float).tolist(), traits) != []
    assert said <= binom.ppf(0.999, 400, 0.05)


def covers(rounds: int, people: int, pairs: int, *, shared: bool, middle: float, tastes: float, pairs_differ: float):
    """In how many rounds the interval over people has the mean over all people and pairs.

    The log-odds that a person prefers ours are normal around `middle` over people and over pairs. Everybody answers the
    same pairs, or pairs of their own.
    """
    rng, names, covered = np.random.default_rng([people, pairs, shared]), [f"p{i}" for i in range(people)], 0
    true = float(np.mean(1 / (1 + np.exp(-middle - math.hypot(tastes, pairs_differ) * rng.normal(size=1_000_000)))))
    for _ in range(rounds):
        of_people, of_pairs = rng.normal(size=(1, people)), rng.normal(size=(pairs, 1 if shared else people))
        odds = middle + tastes * of_people + pairs_differ * of_pairs
        wins = (rng.random((pairs, people)) < 1 / (1 + np.exp(-odds))) * 1.0
        answers = [dict(zip(names, row, strict=True)) for row in wins.tolist()]
        if not shared:
            answers = [{name: win} for answered in answers for name, win in answered.items()]
        found = compare_by_people(answers)["metrics"]
        covered += found["human/win_rate_over_people_low"] <= true <= found["human/win_rate_over_people_high"]
    return covered


TASTES = [
    {"middle": 0.3, "tastes": 1.0, "pairs_differ": 0.0},
    {"middle": 0.8, "tastes": 0.5, "pairs_differ": 1.0},
    {"middle": 3.5, "tastes": 0.5, "pairs_differ": 0.0},  # nearly all prefer ours
    {"middle": 4.0, "tastes": 9.0, "pairs_differ": 0.0},  # each of one mind, a third of the people against ours
]


@pytest.mark.parametrize(("people", "pairs"), [(5, 4), (20, 10)])
@pytest.mark.parametrize("world", TASTES)
@pytest.mark.parametrize("shared", [False, True])
def test_the_interval_over_people_has_the_mean_over_people_and_pairs(world, people, pairs, shared):
    """Before, 46 % of the intervals of five people who nearly agree had it, and 72 % of those over shared pairs."""
    assert covers(150, people, pairs, shared=shared, **world) >= binom.ppf(0.001, 150, 0.92)


@pytest.mark.slow
@pytest.mark.parametrize(("people", "pairs"), [(5, 4), (5, 40), (8, 10), (20, 10), (20, 40)])
@pytest.mark.parametrize("world", TASTES)
@pytest.mark.parametrize("shared", [False, True])
def test_the_interval_over_people_has_it_as_often_as_the_page_says(world, people, pairs, shared):
    assert covers(1000, people, pairs, shared=shared, **world) >= binom.ppf(0.001, 1000, 0.92)


def test_five_people_who_agree_do_not_speak_for_all_people():
    found = compare_by_people([dict.fromkeys("abcde", 1.0)] * 12)["metrics"]
    # by hand: five people and two more, of whom one prefers theirs; squares of five people, of twelve prompts less
    # those of sixty answers, and of the two; the Beta distribution with this variance
    squares = (5 + 12 * (5 / 12) ** 2 - 60 / 12**2 + 1 + 36) / 7**2
    size = 6 / 49 / (squares / 7 / 6) - 1
    assert found["human/win_rate_over_people_low"] == pytest.approx(beta.ppf(0.025, size * 6 / 7, size * 1 / 7))
    assert found["human/win_rate_over_people_high"] == pytest.approx(1.0)


def test_the_rate_over_people_is_corrected_by_the_judge_too() -> None:
    """Each person's answers weigh 1 together, whatever the number of prompts that they answered."""
    given = {"a": "1010", "b": "1110", "c": "101", "d": "100", "e": "10"}
    of_judge = {"p0": 1.0, "p1": 0.0, "p2": 1.0, "p3": 0.0}
    worths = [{name: float(row[at]) for name, row in given.items() if at < len(row)} for at in range(4)]
    others = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    prompts = [*of_judge, *(f"q{at}" for at in range(len(others)))]
    found = compare_by_people([*worths, *({} for _ in others)], [*of_judge.values(), *others], prompts=prompts)
    rows = [(name, at, float(row[at]), 1.0 / len(row)) for name, row in given.items() for at in range(len(row))]
    expected = corrected_win_rate(
        [worth for _, _, worth, _ in rows],
        [of_judge[f"p{at}"] for _, at, _, _ in rows],
        others,
        pairs=[f"p{at}" for _, at, _, _ in rows],
        persons=[[*given].index(name) for name, _, _, _ in rows],
        weights=[weight for _, _, _, weight in rows],
    )
    rates = [found["metrics"][f"human/win_rate_over_people{end}"] for end in ("", "_low", "_high")]
    assert rates == pytest.approx(expected)
    assert rates[0] != pytest.approx(0.55)  # people's answers alone


def test_prompts_that_all_answered_widen_the_interval_over_people():
    """Each of five people prefers ours on half: on the same twelve prompts, or on twelve of their own."""
    shared = [dict.fromkeys("abcde", float(prompt % 2)) for prompt in range(12)]
    own = [{person: float(prompt % 2)} for person in "abcde" for prompt in range(12)]
    low, least = (compare_by_people(each)["metrics"]["human/win_rate_over_people_low"] for each in (shared, own))
    assert low < least - 0.02


def test_with_fewer_than_five_people_there_is_no_interval_over_people() -> None:
    four = compare_by_people([dict.fromkeys("abcd", 1.0)] * 12)
    assert "human/win_rate_over_people" not in four["metrics"]
    assert "Verdict and interval hold for these people only." in say_result_by_people(four)
    rates = dict(zip("abcde", (0.0, 0.25, 0.5, 0.75, 1.0), strict=True))
    five = compare_by_people([rates] * 12)
    # by hand: five people and two more; squares (2/4 + 2/16 + 2/4) + ... of 7 deviations from one half
    squares = 2 * 0.5**2 + 2 * 0.25**2 + 2 * 0.5**2
    size = 0.25 / (squares / 7 / 6) - 1
    low, high = (100 * beta.ppf(end, size / 2, size / 2) for end in (0.025, 0.975))
    assert f"Over people like these, the win rate is 50.0% (95% interval {low:.1f}% to {high:.1f}%)." in (
        say_result_by_people(five)
    )
