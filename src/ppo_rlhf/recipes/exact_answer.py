"""Rewards and judges for questions with one number as answer: 1 if the response gives it, else 0.

The column `answer` holds the reference: GSM8K's worked solution that ends in `#### 72`, or only the number.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_AFTER_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)|(?<=\w)\d[\d,]*(?:\.\d+)?")


def after_hashes(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 where the text after the response's first `#### ` is the reference's, without commas; else 0.

    This is the rule of verl's published GSM8K runs. If the answer is 72, `#### 72.` and `#### $72` are wrong, and so is
    72 without `####`.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        found = _answer_after_hashes(completion)
        scores.append(float(found is not None and found == _reference(expected)))
    return scores


def last_number(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 where the last number of the response equals the reference, as numbers: 1,000.0 is 1000; else 0."""
    found = [_last_number(completion) for completion in completions]
    expected = [_last_number(_reference(text)) for text in answer]
    return [float(ours is not None and ours == theirs) for ours, theirs in zip(found, expected, strict=True)]


def _answer_after_hashes(text: str) -> str | None:
    found = _AFTER_HASHES.search(text)
    return None if found is None else found[1].replace(",", "")


def _reference(answer: Any) -> str:
    return _answer_after_hashes(str(answer)) or str(answer).strip().replace(",", "")


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
