"""People's answers about pairs of responses: the majority's answer, the agreement between people, and preferences."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import ASSISTANT, Chat, Tools, is_text
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.runtime.log_lines import say_once

if TYPE_CHECKING:
    from datasets import Dataset

ANSWERS = ("A", "B", "tie", "both bad")
"""The answers that people can give."""
NUMBER, ANSWER, PERSON, TIME, RATIONALE = "number", "answer", "person", "time", "rationale"
"""Columns of a table of people's answers. Only `number` and `answer` are needed; rationales are for people."""
NUMBERS = range(1_000_000, 10_000_000)
"""The numbers that a pair may have: seven digits, which every program carries whole (a spreadsheet keeps fifteen, and
shows more than eleven as a power of ten)."""
ANNOTATOR = "annotator"
"""Label Studio's name of the column `person`."""
SHEET = ("number", "prompt", "tools", "response_a", "response_b", "cut_off_a", "cut_off_b")
"""What `pairs.jsonl` has of a pair, beside `random_sample`. None of it reveals which policy wrote a response."""
RANDOM = "random_sample"
_READ = {ANSWER, PERSON, ANNOTATOR, TIME, RATIONALE, RANDOM, *SHEET}
_NOBODY = "default"
AGREEMENT = "feedback/agreement"
"""The MLflow key of the metric `agreement`, and its column in a table of people's preferences."""

log = logging.getLogger(__name__)


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
    answers: Mapping[str, str] = field(default_factory=dict)  # each person's newest answer, one of ANSWERS


def is_answers(columns: Iterable[str]) -> bool:
    """Return whether a table has people's answers."""
    return {NUMBER, ANSWER} <= {*columns}


def answers_of(table: Iterable[Mapping[str, Any]], source: str) -> dict[int, dict[str, str]]:
    """Return each person's newest answer to each pair, by the pair's number and by person.

    Rows without an answer are left out; answers that are not in `ANSWERS`, and columns that are not read, are named in
    a warning.

    Raises:
        DataError: A number is not a whole number, a time is no time, two columns name people, or a person has several
            answers to a pair of which none is known to be the newest or which other people may have given.
    """
    given: dict[tuple[int, str], list[tuple[datetime | None, str]]] = {}
    columns = dict[str, None]()
    for row, each in enumerate(table):
        columns |= dict.fromkeys(each)
        number = each[NUMBER]
        if not isinstance(number, int | str | float) or not re.fullmatch(r"[0-9]+(\.0)?", str(number)):
            raise DataError(f"{source}: row {row}: number={number!r} is not the number of a pair. Give it as exported.")
        time = _read_time(each.get(TIME), f"{source}: row {row}")
        persons = [str(each[name]) for name in (PERSON, ANNOTATOR) if each.get(name) not in (None, "")]
        if len(persons) > 1:
            raise DataError(f"{source}: row {row}: both {PERSON} and {ANNOTATOR} name somebody. Keep one of them.")
        if each[ANSWER] not in (None, ""):
            key = int(str(number).removesuffix(".0")), (persons or [_NOBODY])[0]
            given.setdefault(key, []).append((time, str(each[ANSWER])))
    unread = [name for name in columns if name not in _READ]
    if unread:
        log.warning("%s: these columns are not read: %s.", source, ", ".join(unread))
    newest = {key: _newest(answers, key, source, unread) for key, answers in given.items()}
    if others := [answer for answer in newest.values() if answer not in ANSWERS]:
        log.warning(
            "%s: %d answers are not one of %s and are left out: %s.",
            source,
            len(others),
            ", ".join(ANSWERS),
            ", ".join(sorted({*others})[:3]),
        )
    answers: dict[int, dict[str, str]] = {}
    for (number, person), answer in newest.items():
        if answer in ANSWERS:
            answers.setdefault(number, {})[person] = answer
    return answers


def _newest(
    answers: Sequence[tuple[datetime | None, str]], key: tuple[int, str], source: str, unread: Sequence[str]
) -> str:
    """Return a person's newest answer to a pair.

    `key` is the pair's number and the person; `unread` are columns that may name people where the columns that are read
    name nobody.
    """
    if len(answers) == 1:
        return answers[0][1]
    number, person = key
    if person == _NOBODY and unread:
        raise DataError(
            f"{source}: pair {number} has {len(answers)} answers, and no {PERSON} says whose. If a column has people's "
            f"names, call it {PERSON}; remove the columns {', '.join(unread)} if they have none."
        )
    whose = f"{source}: pair {number} has {len(answers)} answers" + (f" of {person}" if person != _NOBODY else "")
    times = [time for time, _ in answers if time is not None]
    if len(times) < len(answers):
        raise DataError(
            f"{whose}, and not all have a time, so that none is the newest. Remove all but one, or give each a {TIME}, "
            f"and people's names as {PERSON}."
        )
    last = {answer for time, answer in answers if time == max(times)}
    if len(last) > 1:
        raise DataError(f"{whose}, of which {' and '.join(sorted(last))} have one time. Remove all but one.")
    return last.pop()


def _read_time(value: Any, where: str) -> datetime | None:
    """Return a time in UTC; None without one.

    A time is ISO 8601 (without an offset: UTC), a `datetime`, or seconds or milliseconds since 1970.

    Raises:
        DataError: The value is no such time.
    """
    if value in (None, "") or (isinstance(value, float) and math.isnan(value)):
        return None
    text = str(value).strip()
    try:
        if re.fullmatch(r"[0-9]{9,10}(\.[0-9]*)?|[0-9]{12,13}(\.0*)?", text):
            number = float(text)
            return datetime.fromtimestamp(number / 1000 if number >= 1e11 else number, UTC)
        if not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ]|$)", text):
            raise ValueError(text)
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise DataError(
            f"{where}: {TIME}={value!r} is no time. Give ISO 8601, such as 2026-01-31T12:00:00Z, or seconds since 1970."
        ) from None


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
    `AGREEMENT`, Krippendorff's alpha of all answers, which no model sees.

    Raises:
        DataError: No answer prefers a response, or the pairs have both texts and chats.
    """
    alpha = agreement([pair.answers for pair in comparisons])
    chosen = [majority(pair.answers) for pair in comparisons]
    preferred = [each for each in zip(comparisons, chosen, strict=True) if each[1] in ("A", "B")]
    # Leave out pairs with a blank response, because a table of preferences refuses blank texts
    rows = [_row(*each, alpha) for each in preferred if is_text(each[0].response_a) and is_text(each[0].response_b)]
    counts, people = Counter(chosen), {person for pair in comparisons for person in pair.answers}
    line = (
        f"{source}: {len(rows)} of {len(comparisons)} answered pairs are used; {counts['tie']} ties, "
        f"{counts['both bad']} both bad, {counts[None]} without a majority, {len(preferred) - len(rows)} with a blank "
        f"response. {len(people)} people"
        + ("." if alpha is None else f", whose agreement (Krippendorff's alpha) is {alpha:.2f}.")
    )
    say_once(line, logging.INFO)
    if not rows:
        raise DataError(
            f"{source}: nobody has preferred a response yet in {len(comparisons)} pairs. Let people answer some."
        )
    if len({is_text(row["chosen"]) for row in rows}) > 1:
        raise DataError(f"{source}: these are pairs of texts and of chats. Collect each kind in a separate queue.")
    has_tools = any(row["tools"] is not None for row in rows)
    return table_of({name: [row[name] for row in rows] for name in rows[0] if name != "tools" or has_tools})


def _row(pair: Comparison, chosen: str | None, alpha: float | None) -> dict[str, Any]:
    better, worse = (pair.response_b, pair.response_a) if chosen == "B" else (pair.response_a, pair.response_b)
    is_chat = not is_text(pair.prompt)
    return {
        "prompt": pair.prompt,
        "chosen": [{"role": ASSISTANT, "content": better}] if is_chat else better,
        "rejected": [{"role": ASSISTANT, "content": worse}] if is_chat else worse,
        "tools": None if pair.tools is None else as_json(pair.tools),
        AGREEMENT: alpha,
    }
