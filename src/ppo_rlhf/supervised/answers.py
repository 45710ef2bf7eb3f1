"""People's answers about pairs of responses: the majority's answer, and the agreement between people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

AGREEMENT = "feedback/agreement"
"""The MLflow key of the metric `agreement`."""
NUMBER, TRACE, ALPHA = "number", "trace_id", "agreement"
PEOPLE, WHEN, RATIONALES = "people", "answered_at", "rationales"
KEPT = (NUMBER, TRACE, PEOPLE, WHEN, RATIONALES, ALPHA)
"""Columns that a table of people's preferences has beside the columns from which a reward model is trained."""


def majority(answers: Mapping[str, str]) -> str | None:
    """Return the answer of more than half of the people; None without such an answer or without answers."""
    if not answers:
        return None
    value, count = Counter(answers.values()).most_common(1)[0]
    return value if 2 * count > len(answers) else None


def agreement(answers: Sequence[Mapping[str, str]]) -> float | None:
    """Return Krippendorff's alpha of people's answers: 1 is perfect agreement, 0 is agreement by chance.

    `answers` has one mapping of person to answer for each pair. Answers are nominal (unordered), and people may skip
    pairs of responses. Return None where alpha is undefined: no pair has answers of two people, or all answers to such
    pairs are equal. Source: Krippendorff 2011, Computing Krippendorff's Alpha-Reliability.
    """
    several = [Counter(values.values()) for values in answers if len(values) > 1]
    expected = _disagreement(sum(several, Counter()))
    if not expected:
        return None
    observed = sum(_disagreement(counts) * counts.total() for counts in several) / sum(map(Counter.total, several))
    return 1.0 - observed / expected


def _disagreement(counts: Counter[str]) -> float:
    """Return the share of unequal answers among all ordered pairs of two answers; 0 without such a pair."""
    total = counts.total()
    return (total**2 - sum(count**2 for count in counts.values())) / max(1, total * (total - 1))
