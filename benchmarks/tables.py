"""Markdown tables of results; without a library, since the peers' environments import it, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """Return the lines of cells, the heading and its rule included, as a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
