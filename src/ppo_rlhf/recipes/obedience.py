"""Rewards of the recipe `obedience`: a chat model answers a request, which names a topic and gives one instruction.

`scripts/write_obedience.py` makes the prompts. Their columns are `kind` (of the instruction), `limit` (the most words
that the instruction allows; 0 for other kinds) and `names` (the words that name the topic).
"""

import re
from collections.abc import Sequence
from typing import Any

from ppo_rlhf.core.errors import DataError

FEWEST_WORDS = 5
COPIED_WORDS = 4
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_END_OF_SENTENCE = re.compile(r"[.!?]+(?=\s|$)")

Messages = Sequence[dict[str, Any]]


def naive(
    prompts: Sequence[str],
    completions: Sequence[str],
    kind: Sequence[str],
    limit: Sequence[int],
    names: Sequence[Sequence[str]],
    **_: Any,
) -> list[float]:
    """Return 1 for an answer of at least five words that obeys its instruction and names its topic, else 0."""
    return [
        float(_obeys(asked, most, answer) and _names(topic, answer) and len(_words(answer)) >= FEWEST_WORDS)
        for asked, most, topic, answer in zip(kind, limit, names, completions, strict=True)
    ]


def strict(
    prompts: Sequence[str],
    completions: Sequence[str],
    messages: Sequence[Messages],
    kind: Sequence[str],
    limit: Sequence[int],
    names: Sequence[Sequence[str]],
    **_: Any,
) -> list[float]:
    """Return the reward of `naive`, but 0 for an answer that repeats four or more consecutive words of the request."""
    scores = naive(prompts, completions, kind, limit, names)
    repeated = copied(prompts, completions, messages)
    return [score * (1.0 - copy) for score, copy in zip(scores, repeated, strict=True)]


def obedient(
    prompts: Sequence[str], completions: Sequence[str], kind: Sequence[str], limit: Sequence[int], **_: Any
) -> list[float]:
    """Return 1 where an answer obeys its instruction, else 0."""
    return [float(_obeys(*row)) for row in zip(kind, limit, completions, strict=True)]


def on_topic(
    prompts: Sequence[str], completions: Sequence[str], names: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """Return 1 where an answer names its topic by a whole word, else 0."""
    return [float(_names(*row)) for row in zip(names, completions, strict=True)]


def copied(prompts: Sequence[str], completions: Sequence[str], messages: Sequence[Messages], **_: Any) -> list[float]:
    """Return 1 where an answer repeats four or more consecutive words of the request, else 0; case does not count."""
    repeated = []
    for chat, answer in zip(messages, completions, strict=True):
        request = next(message["content"] for message in reversed(chat) if message["role"] == "user")
        repeated.append(float(bool(_runs(request) & _runs(answer))))
    return repeated


def _words(text: str) -> list[str]:
    return [word.replace("’", "'") for word in _WORD.findall(text.lower())]


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _words(text)
    return {tuple(words[start : start + COPIED_WORDS]) for start in range(len(words) - COPIED_WORDS + 1)}


def _names(names: Sequence[str], answer: str) -> bool:
    """Return whether the answer has one of the names as whole words: "train" does not name rain."""
    text = f" {' '.join(_words(answer))} "
    return any(f" {name} " in text for name in names)


def _obeys(kind: str, limit: int, answer: str) -> bool:
    if kind == "lowercase":
        return any(letter.islower() for letter in answer) and not any(letter.isupper() for letter in answer)
    if kind == "short":
        return len(_words(answer)) <= limit
    if kind == "no_comma":
        return "," not in answer
    if kind == "end":
        return _words(answer)[-1:] == ["done"]
    if kind == "one_sentence":
        return [match.end() for match in _END_OF_SENTENCE.finditer(answer)] == [len(answer.rstrip())]
    raise DataError(f"column kind: {kind!r} is no instruction of scripts/write_obedience.py")
