"""What people answered to pairs of responses: what most of them said, and how far they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

AGREEMENT = "feedback/agreement"
"""The metric of `agreement`."""
TRACE, PEOPLE, WHEN, RATIONALES, ALPHA = "trace_id", "people", "answered_at", "rationales", "agreement"
KEPT = (TRACE, PEOPLE, WHEN, RATIONALES, ALPHA)
"""Columns of preferences that people gave, beside those that a reward model reads."""


def majority(answers: Mapping[str, str]) -> str | None:
    """Return what more than half of the people answered; None if nothing was, or nobody did."""
    if not answers:
        return None
    value, count = Counter(answers.values()).most_common(1)[0]
    return value if 2 * count > len(answers) else None


def agreement(answers: Sequence[Mapping[str, str]]) -> float | None:
    """Return Krippendorff's alpha of the people's answers, one mapping a pair: 1 is agreement, 0 what chance gives.

    Answers are names without order (nominal), and people may leave pairs out. Where no pair was answered twice there is
    no agreement to measure: None. Source: Krippendorff 2011, Computing Krippendorff's Alpha-Reliability.
    """
    several = [each for each in answers if len(each) > 1]
    if not several:
        return None
    from nltk.metrics.agreement import AnnotationTask  # heavy: only answers of several people pay for it

    told = [(person, pair, value) for pair, given in enumerate(several) for person, value in given.items()]
    return float(AnnotationTask(told).alpha())
