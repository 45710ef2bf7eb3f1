"""The majority's answer about a pair, and the agreement between people."""

from __future__ import annotations

import random

import pytest
from nltk.metrics.agreement import AnnotationTask

from ppo_rlhf.people.answers import agreement, majority


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("", None),
        ("A", "A"),
        ("AB", None),
        ("AAB", "A"),
        ("ABt", None),
        ("AABB", None),
        ("AABt", None),  # half is no majority
        ("AAABt", "A"),
        ("ttB", "t"),
    ],
)
def test_a_majority_is_more_than_half_of_those_who_answered(answers: str, expected: str | None) -> None:
    assert majority(dict(enumerate(answers))) == expected  # type: ignore[arg-type]


def by_pair(table: list[str]) -> list[dict[str, str]]:
    """Turn one row per person (one character per pair, `*` for no answer) into one mapping per pair."""
    return [
        {str(person): value for person, value in enumerate(pair) if value != "*"} for pair in zip(*table, strict=True)
    ]


def test_agreement_is_that_of_the_tables_which_krippendorff_worked_by_hand() -> None:
    # Krippendorff 2011, Computing Krippendorff's Alpha-Reliability, examples A (binary), B (nominal) and C (with gaps)
    assert agreement(by_pair(["0100000010", "1110010000"])) == pytest.approx(0.095, abs=5e-4)
    assert agreement(by_pair(["aabbdcccedda", "babbbccceddd"])) == pytest.approx(0.692, abs=5e-4)
    four = ["123321412***", "1233224125*3", "*3332342251*", "12332441251*"]
    assert agreement(by_pair(four)) == pytest.approx(0.743, abs=5e-4)


def test_agreement_equals_nltks_to_the_bit() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        people, pairs, values = drawn.randint(2, 6), drawn.randint(1, 40), "ABtb"[: drawn.randint(2, 4)] + "*" * 2
        table = by_pair(["".join(drawn.choices(values, k=pairs)) for _ in range(people)])
        several = [pair for pair in table if len(pair) > 1]
        if len({value for pair in several for value in pair.values()}) < 2:
            assert agreement(table) is None
            continue
        task = AnnotationTask([(who, row, value) for row, pair in enumerate(several) for who, value in pair.items()])
        assert agreement(table) == task.alpha()


def test_agreement_is_undefined_where_all_answers_are_equal_and_without_a_pair_answered_twice() -> None:
    assert agreement(by_pair(["AAAA", "AAAA"])) is None
    assert agreement(by_pair(["AAAAB", "AAAA*"])) is None
    assert agreement(by_pair(["AB**", "**AB"])) is None
    assert agreement([{}, {}]) is None
