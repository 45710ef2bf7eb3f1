"""A person's newest answer to a pair, the majority's answer, and the agreement between people."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from nltk.metrics.agreement import AnnotationTask

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.people.answers import agreement, answers_of, majority

# Each row has the same moments, the oldest first, as programs write them
MOMENTS = [
    ("2026-01-01T23:30:00-05:00", "2026-01-02T05:00:00+00:00"),  # 04:30 and 05:00 in UTC
    ("2026-01-02T05:00:00+05:00", "2026-01-02T00:30:00Z"),
    ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.5Z"),
    ("2026-01-02T03:04:05", "2026-01-02 03:04:06"),
    ("2026-01-02 23:00:00", "2026-01-03T01:00:00"),
    ("2026-01-02", "2026-01-02T00:00:01.000000001Z"),
    (999_999_999, 1_767_322_800),  # seconds since 1970; the second is 2026-01-02T03:00:00Z
    ("1767322800.25", "1767322800.5"),
    ("2026-01-02T02:59:59.999Z", 1_767_322_800_000),
]


@pytest.mark.parametrize(("older", "newer"), MOMENTS)
def test_the_newer_answer_of_a_person_counts_whatever_its_time_looks_like(older: Any, newer: Any) -> None:
    rows = [{"number": 1, "answer": "A", "time": older}, {"number": 1, "answer": "B", "time": newer}]
    for order in itertools.permutations(rows):
        assert answers_of(order, "answers.jsonl") == {1: {"default": "B"}}


@pytest.mark.parametrize(
    "time", ["02/01/2026 10:00", "31.12.2026", "10:00", "yesterday", "2026-13-01", "20260102", 12.5, "٢٠٢٦٠١٠٢٠٣"]
)
def test_what_is_no_time_is_refused_in_one_line(time: Any) -> None:
    with pytest.raises(DataError, match=r"^a\.csv: row 1: time=.* is no time\. Give ISO 8601, such as \S+, or [^\n]*$"):
        answers_of([{"number": 1, "answer": "A"}, {"number": 2, "answer": "A", "time": time}], "a.csv")


@pytest.mark.parametrize("name", ["person", "annotator"])
def test_people_are_told_apart_by_either_name_of_the_column(name: str) -> None:
    rows = [{"number": 1, "answer": answer, name: who} for who, answer in zip((7, "b", "c"), "ABA", strict=True)]
    assert answers_of(rows, "a.csv") == {1: {"7": "A", "b": "B", "c": "A"}}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"answer": "A"}, {"answer": "B"}], "pair 1 has 2 answers, and not all have a time"),
        ([{"answer": "A"}, {"answer": "A"}], "pair 1 has 2 answers, and not all have a time"),
        ([{"answer": "A", "person": "x"}, {"answer": "B", "person": "x", "time": 1e9}], "2 answers of x, and not all"),
        ([{"answer": a, "time": 1e9} for a in "AB"], "2 answers, of which A and B have one time"),
        ([{"answer": "A", "rater": w, "time": 1e9 + n} for n, w in enumerate("xy")], "2 answers, and no person says"),
        (
            [{"answer": a, "person": "", "email": a} for a in "AB"],
            "2 answers, and no person says whose.* columns email",
        ),
        (
            [{"answer": a, "annotator": None, "email": a, "time": 1e9} for a in "AB"],
            "2 answers, and no person says whose",
        ),
        ([{"answer": "A", "person": "x", "annotator": "y"}], "row 0: both person and annotator"),
    ],
)
def test_answers_of_which_none_is_known_to_be_the_newest_are_refused(rows: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(DataError, match=rf"^a\.csv: .*{reason}"):
        answers_of([{"number": 1, **row} for row in rows], "a.csv")


@pytest.mark.parametrize("number", ["٣", "1_0", " 3", "3.5", "-3", "", None])
def test_a_number_that_no_pair_has_is_refused(number: Any) -> None:
    with pytest.raises(DataError, match=r"^a\.csv: row 0: number=.* is not the number of a pair\."):
        answers_of([{"number": number, "answer": "A"}], "a.csv")


def test_columns_that_are_not_read_are_named(caplog: Any) -> None:
    row = {"number": "1000001", "answer": "A", "person": "x", "prompt": "p", "lead_time": 3.5, "id": 1}
    assert answers_of([row], "a.csv") == {1_000_001: {"x": "A"}}
    assert caplog.messages == ["a.csv: these columns are not read: lead_time, id."]


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
