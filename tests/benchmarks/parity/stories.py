"""A task for a small story model: a reward that is plain Python, and prompts. Only the standard library is used.

`python tests/benchmarks/parity/stories.py prompts.jsonl` writes the prompts.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

_HAPPY = (
    "happy happily smile smiled smiles smiling fun laugh laughed laughing love loved loves joy glad good great nice "
    "kind friend friends hug hugged play played playing sunny beautiful proud excited yummy"
)
HAPPY = frozenset(_HAPPY.split())
CAP = 5  # happy words that count

_NAMES = ("Lily", "Tom", "Mia", "Ben", "Sara", "Max", "Anna", "Sam", "Lucy", "Tim")
_OPENINGS = (
    "Once upon a time, there was a little child named {}.",
    "One day, {} went to the park.",
    "{} had a big red ball.",
    "{} and the dog were in the garden.",
    "It was raining, and {} was at home.",
    "{} wanted a new toy.",
    "One morning, {} woke up early.",
    "{} was sad.",
    "{} found a small box under the tree.",
    "Mom and {} went to the shop.",
)
_CONTINUATIONS = ("", " Then", " But", " The", " It was", " Suddenly,")


def happy_words(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return how many different happy words each completion has, at most 5, as numbers from 0 to 1."""
    found = (HAPPY & set(re.findall(r"[a-z]+", completion.lower())) for completion in completions)
    return [min(len(words), CAP) / CAP for words in found]


def story_prompts() -> list[str]:
    """Return 600 beginnings of stories."""
    combinations = itertools.product(_OPENINGS, _NAMES, _CONTINUATIONS)
    return [opening.format(name) + continuation for opening, name, continuation in combinations]


if __name__ == "__main__":
    lines = (json.dumps({"prompt": prompt}) for prompt in story_prompts())
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
