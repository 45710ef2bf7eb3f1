"""Rewards and judges for questions whose answer is one number: 1 if the response gives this number, else 0.

The column `answer` holds the reference: a worked solution of GSM8K, which ends in `#### 72`, or only the number.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)|(?<=\w)\d[\d,]*(?:\.\d+)?")


def after_hashes(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 where the number after the response's first `#### ` equals the reference, else 0; commas do not count.

    verl's published GSM8K runs score by the number after the first `#### `, too. If the answer is 72, then `#### 72.`,
    `#### $72` and 72 without `####` are wrong.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        given = _answer_after_hashes(completion)
        scores.append(float(given is not None and given == _reference(expected)))
    return scores


def last_number(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 where the last number of the response equals the reference, else 0. 1,000.0 equals 1000."""
    given = [_last_number(completion) for completion in completions]
    expected = [_last_number(_reference(text)) for text in answer]
    return [float(number is not None and number == right) for number, right in zip(given, expected, strict=True)]


def _answer_after_hashes(text: str) -> str | None:
    match = _AFTER_HASHES.search(text)
    return None if match is None else match[1].replace(",", "")


def _reference(answer: Any) -> str:
    return _answer_after_hashes(str(answer)) or str(answer).strip().replace(",", "")


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
