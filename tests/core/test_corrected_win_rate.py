"""A judge's win rate corrected by people: PPI++'s estimate, and an interval that holds whatever the judge's bias."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.statistics import corrected_win_rate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import people_and_judge

    yield people_and_judge.simulate
    for name in ("people_and_judge", "tables"):
        sys.modules.pop(name, None)


def given(n: int, others: int, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Outcomes by arithmetic: people's with ties, a judge's that differ on some, and the judge's of other pairs."""
    people = [float((7 * i + seed) % 5 < 3) if i % 6 else 0.5 for i in range(n)]
    judge = [people[i] if i % 4 else float((3 * i + seed) % 4 < 2) for i in range(n)]
    return people, judge, [float((5 * i + seed) % 7 < 4) if i % 9 else 0.5 for i in range(others)]


def test_the_estimate_of_four_answers_by_hand() -> None:
    # Cov(Y, F) = 1/2 - 1/2 x 3/4 = 1/8; of all eight verdicts four are wins, so Var(F) = 1/4 x 8/7;
    # λ = 1/8 / (2/7) / (1 + 4/4) = 7/32; 1/2 - 7/32 (3/4 - 1/4) = 25/64
    assert corrected_win_rate([1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0])[0] == pytest.approx(25 / 64, abs=1e-12)


@pytest.mark.parametrize(
    ("inputs", "expected", "low", "high"),
    [  # ppi_mean_pointestimate and ppi_mean_ci of ppi-python 0.2.3; ppi_estimate of truescore 0.7.4 gives the same mean
        ((12, 30, 0), 0.4979166666666667, 0.3015650427048403, 0.694268290628493),
        ((25, 200, 1), 0.48803822075782544, 0.3650229680450352, 0.6110534734706157),
        ((40, 60, 2), 0.6387984751506024, 0.5317482239090668, 0.745848726392138),
    ],
)
def test_the_estimate_is_that_of_ppi_python_and_the_interval_is_wider_for_few_answers_only(
    inputs: tuple[int, int, int], expected: float, low: float, high: float
) -> None:
    found = corrected_win_rate(*given(*inputs))
    assert found[0] == pytest.approx(expected, abs=1e-12)
    assert 1.0 < (found[2] - found[1]) / (high - low) < 1.0 + 2.0 / inputs[0]


def test_without_a_judge_a_clean_sweep_keeps_a_width() -> None:
    # by hand: one win and one loss more make 5 of 6; squares 5/36 + 25/36, so the variance is 5/6 / 6 / 5 = 1/36, and
    # the Beta distribution with it counts 5/36 / (1/36) - 1 = 4
    expected = beta.ppf([0.025], 4 * 5 / 6, 4 * 1 / 6)[0]
    assert corrected_win_rate([1] * 4, [1] * 4, []) == pytest.approx((1.0, expected, 1.0), abs=1e-9)
    for judge in ([1] * 20, [0] * 20):
        _, low, high = corrected_win_rate([1] * 20, judge, judge * 5)
        assert 0.7 < low < 0.9
        assert high == 1.0


def test_a_judge_that_happens_to_be_right_on_all_answers_is_not_taken_as_always_right() -> None:
    people = [1.0, 0.0] * 10
    rate, low, high = corrected_win_rate(people, people, [1.0, 1.0, 1.0, 0.0] * 125)
    assert rate == 0.75  # λ would be 1.25, and is cut at 1
    # PPI++'s normal interval has only the 500 others' noise: 2 x 1.96 x sqrt(3/16 / 500) = 0.076
    assert 0.15 < high - low < 0.25


def test_wins_and_losses_exchanged_give_the_mirrored_interval() -> None:
    people, judge, others = (np.array(each) for each in given(25, 200, 1))
    rate, low, high = corrected_win_rate(people, judge, others)
    mirrored = corrected_win_rate(1 - people, 1 - judge, 1 - others)
    assert mirrored == pytest.approx((1 - rate, 1 - high, 1 - low), abs=1e-9)


def test_a_judge_that_adds_half_a_win_everywhere_changes_no_estimate() -> None:
    people, judge, others = [1, 1, 0, 0, 1, 0], np.array([0.5, 0.5, 0, 0, 0, 0.5]), np.array([0.5, 0, 0, 0.5, 0.5])
    expected = corrected_win_rate(people, judge, others)[0]
    assert corrected_win_rate(people, judge + 0.5, others + 0.5)[0] == pytest.approx(expected, abs=1e-12)


def test_answers_to_one_pair_count_as_one() -> None:
    people, judge, others = given(12, 30, 0)
    once = corrected_win_rate(people, judge, others)
    thrice = corrected_win_rate(people * 3, judge * 3, others, pairs=[*range(12)] * 3)
    assert thrice == pytest.approx(once, abs=1e-12)
    apart = corrected_win_rate(people * 3, judge * 3, others)
    assert apart[2] - apart[1] < 0.7 * (once[2] - once[1])


def test_each_pair_by_one_person_is_as_wide_over_people_as_over_pairs() -> None:
    people, judge, others = given(12, 30, 0)
    names = [*"abcdefghijkl"]
    for clusters in ({"persons": names}, {"pairs": names}, {"pairs": names, "persons": names}):
        assert corrected_win_rate(people, judge, others, **clusters) == corrected_win_rate(people, judge, others)


def test_a_weight_of_two_is_the_estimate_of_an_answer_given_twice() -> None:
    people, judge, others = given(12, 30, 0)
    weights = [2.0] * 6 + [1.0] * 6
    twice = [[*each, *each[:6]] for each in (people, judge)]
    # without a judge the estimate is a weighted mean; with it λ differs by n alone, so the others are as many times n
    weighted = corrected_win_rate(people, judge, [], weights=weights)
    assert weighted[0] == pytest.approx(np.average(people, weights=weights), abs=1e-12)
    # Kish: 18² / (6 x 4 + 6) = 10.8 answers
    many, fewer = corrected_win_rate(*twice, others * 18)[0], corrected_win_rate(people, judge, others * 18)[0]
    assert corrected_win_rate(people, judge, others * 18, weights=weights)[0] == pytest.approx(many, abs=2e-3)
    assert abs(many - fewer) > 5e-3
    scaled = corrected_win_rate(people, judge, others, weights=[7.0 * weight for weight in weights])
    assert scaled == pytest.approx(corrected_win_rate(people, judge, others, weights=weights), abs=1e-12)


def test_weights_undo_a_choice_by_known_probabilities() -> None:
    """Pairs that the judge gives to theirs are asked four times as often."""
    rng, plain, weighted = np.random.default_rng(0), [], []
    for _ in range(300):
        people = rng.random(1_000) < 0.6
        judge = np.where(rng.random(1_000) < 0.8, people, ~people)
        chance = np.where(judge, 0.05, 0.2)
        asked = np.flatnonzero((rng.random(1_000) < chance)[:500])
        plain.append(np.mean(people[asked]))
        rate, low, high = corrected_win_rate(people[asked], judge[asked], judge[500:], weights=1.0 / chance[asked])
        weighted.append((rate, low <= 0.6 <= high))
    assert abs(np.mean(plain) - 0.6) > 0.1
    rates, covered = zip(*weighted, strict=True)
    assert np.mean(rates) == pytest.approx(0.6, abs=4 * np.std(rates) / 300**0.5)
    assert np.mean(covered) > 0.92


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"people": []}, "entries; give n"),
        ({"judge_on_people": [1.0]}, r"have \[1, 2\] entries"),
        ({"persons": ["a"]}, "entries"),
        ({"judge_on_others": [1.0, float("nan")]}, "an outcome must be from 0 to 1"),
        ({"people": [1.0, 2.0]}, "an outcome must be from 0 to 1"),
        ({"weights": [1.0, 0.0]}, "a weight above 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        corrected_win_rate(**{"people": [1.0, 0.0], "judge_on_people": [1, 1], "judge_on_others": [1], **change})


@pytest.mark.parametrize(
    "judge", ["right on 92 %", "right on 75 %, errors for ours", "knows nothing, says ours on 80 %"]
)
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_the_interval_of_40_answers_has_the_rate_whatever_the_judge(simulate: Any, judge: str, rate: float) -> None:
    covered, width = simulate(judge, rate, 40, draws=300)
    assert covered > 0.90  # 0.95 less 4 standard errors
    assert width < {"right on 92 %": 0.8}.get(judge, 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["right on 92 %", "right on 75 %", "knows nothing, says ours on 80 %"])
@pytest.mark.parametrize("answers", [20, 40, 100])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_interval_has_the_rate_as_often_as_the_page_says(
    simulate: Any, judge: str, answers: int, rate: float
) -> None:
    covered, width = simulate(judge, rate, answers)
    assert 0.93 <= covered <= (0.99 if answers == 20 else 0.976)
    if judge == "right on 92 %" and 0.3 <= rate <= 0.7:
        assert width < 0.72
    assert width < 1.1
