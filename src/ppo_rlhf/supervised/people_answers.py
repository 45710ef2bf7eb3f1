"""People's answers about pairs of responses: the majority's answer, the agreement between people, and preferences."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import ASSISTANT, Chat, Tools, is_text
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.models.quiet import said

if TYPE_CHECKING:
    from datasets import Dataset

ANSWERS = ("A", "B", "tie", "both bad")
"""The answers that people can give."""
AGREEMENT = "feedback/agreement"
"""The MLflow key of the metric `agreement`."""
NUMBER, TRACE, ALPHA = "number", "trace_id", "agreement"
PEOPLE, WHEN, RATIONALES = "people", "answered_at", "rationales"
KEPT = (NUMBER, TRACE, PEOPLE, WHEN, RATIONALES, ALPHA)
"""Columns that a table of people's preferences has beside the columns from which a reward model is trained."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """One person's answer about a pair of responses."""

    value: str  # the person's answer, one of ANSWERS
    person: str
    when: str  # time of the answer: ISO 8601 in UTC
    rationale: str = ""


@dataclass(frozen=True)
class Comparison:
    """A pair of responses to one prompt, as shown to people, with people's answers."""

    number: int
    prompt: str | Chat
    response_a: str
    response_b: str
    tools: Tools = None
    cut_off_a: bool = False  # whether the response ended at the length limit
    cut_off_b: bool = False
    answers: tuple[Answer, ...] = ()  # each person's newest answer to the pair of responses
    trace_id: str = ""
    run_id: str = ""  # MLflow run that collected this pair of responses
    others: tuple[str, ...] = field(default=(), repr=False)  # people's answers that are not in ANSWERS


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


def preferences_of(comparisons: Sequence[Comparison], source: str) -> Dataset:
    """Return one row per pair in which a majority prefers one response.

    The columns are `prompt`, `chosen` and `rejected` (texts, or chats as messages), `tools` if a prompt has tools, and
    `number`, `trace_id`, `people`, `answered_at`, `rationales` and `agreement`, which no model sees.

    Raises:
        DataError: No answer prefers a response, or the pairs have both texts and chats.
    """
    answers = [{answer.person: answer.value for answer in comparison.answers} for comparison in comparisons]
    chosen = [majority(values) for values in answers]
    alpha = agreement(answers)
    preferred = [pair for pair in zip(comparisons, chosen, strict=True) if pair[1] in ("A", "B")]
    # Leave out pairs with a blank response, because a table of preferences refuses blank texts
    rows = [_row(*pair, alpha) for pair in preferred if is_text(pair[0].response_a) and is_text(pair[0].response_b)]
    _log_counts(source, answers, chosen, alpha, blank=len(preferred) - len(rows))
    if not rows:
        raise DataError(
            f"{source}: nobody has preferred a response yet in {len(comparisons)} pairs. Let people answer some."
        )
    if len({is_text(row["chosen"]) for row in rows}) > 1:
        raise DataError(f"{source}: these are pairs of texts and of chats. Collect each kind in a separate queue.")
    has_tools = any(row["tools"] is not None for row in rows)
    return table_of({name: [row[name] for row in rows] for name in rows[0] if name != "tools" or has_tools})


def _row(comparison: Comparison, chosen: str | None, alpha: float | None) -> dict[str, Any]:
    better, worse = comparison.response_a, comparison.response_b
    if chosen == "B":
        better, worse = worse, better
    answers = sorted(comparison.answers, key=lambda answer: answer.when)
    is_chat = not is_text(comparison.prompt)
    return {
        "prompt": comparison.prompt,
        "chosen": [{"role": ASSISTANT, "content": better}] if is_chat else better,
        "rejected": [{"role": ASSISTANT, "content": worse}] if is_chat else worse,
        "tools": None if comparison.tools is None else as_json(comparison.tools),
        NUMBER: comparison.number,
        TRACE: comparison.trace_id,
        PEOPLE: [answer.person for answer in answers],
        WHEN: [answer.when for answer in answers],
        RATIONALES: [answer.rationale for answer in answers],
        ALPHA: alpha,
    }


def _log_counts(
    source: str, answers: list[dict[str, str]], chosen: list[str | None], alpha: float | None, *, blank: int
) -> None:
    """Log once per run how many pairs of a review queue are used, and why the remaining pairs are not used."""
    unanswered = sum(not values for values in answers)
    counts = Counter(choice for choice, values in zip(chosen, answers, strict=True) if values)
    used, people = counts["A"] + counts["B"] - blank, len({person for values in answers for person in values})
    line = (
        f"{source}: {used} of {len(answers)} pairs are used; {counts['tie']} ties, {counts['both bad']} both bad, "
        f"{counts[None]} without a majority, {unanswered} unanswered, {blank} with a blank response. {people} people"
        + ("." if alpha is None else f", whose agreement (Krippendorff's alpha) is {alpha:.2f}.")
    )
    if line not in said:
        said.add(line)
        log.info("%s", line)


def warn_of_others(source: str, others: Sequence[str]) -> None:
    """Log how many answers are not in `ANSWERS`."""
    if others:
        log.warning(
            "%s: %d answers are not one of %s and are left out: %s.",
            source,
            len(others),
            ", ".join(ANSWERS),
            ", ".join(sorted({*others})[:3]),
        )
