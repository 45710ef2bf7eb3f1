"""The contract between the logged metrics and the table in docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable


def documented_metrics(markdown: str) -> set[str]:
    """Return the keys in the first column of a Markdown document's tables, without the section on rates."""
    tables = re.sub(r"\n## What intervals and alarms hold\n.*?(?=\n## )", "", markdown, flags=re.DOTALL)
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    return {key for cell in rows for key in re.findall(r"`([^`]+)`", cell)}


def metric_problems(emitted: Iterable[str], documented: set[str]) -> list[str]:
    """Return metrics that are logged but not documented, or documented but never logged.

    `<name>` in a documented key stands for any word.
    """
    emitted = set(emitted)
    patterns = {key: re.compile(re.sub(r"<\w+>", "[^/]+", key)) for key in documented}
    undocumented = [key for key in emitted if not any(pattern.fullmatch(key) for pattern in patterns.values())]
    never = [key for key, pattern in patterns.items() if not any(pattern.fullmatch(name) for name in emitted)]
    return sorted(f"not documented: {key}" for key in undocumented) + sorted(f"never logged: {key}" for key in never)
