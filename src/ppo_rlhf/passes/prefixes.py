"""Finds the tokens with which rows begin alike, so that a pass computes them once.

Chats share the system turn of their template, episodes of agents their tool descriptions, and the responses to one
prompt the whole prompt. In causal attention no token depends on later tokens, so the hidden states of a common
beginning are the same in all rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

LEAST_SHARED = 8
"""The fewest tokens of a common beginning that is computed once: each pass cuts its attention into two for it."""
REPEATED = 8
"""The keys and values of a prefix are repeated for each further row. They take at most 1 / `REPEATED` of the memory of
the tokens that the row does not compute: in a GPT block of width h 2 h numbers per token of 24 h (docs/memory.md)."""


class Prefix(NamedTuple):
    """The first `length` tokens of at least two rows, which are the same in these rows."""

    length: int
    rows: list[int]  # the rows' numbers, in ascending order

    @property
    def saved(self) -> int:
        """The tokens that a pass does not compute because it computes the prefix once."""
        return self.length * (len(self.rows) - 1)


@dataclass(frozen=True)
class AlikeRows:
    """Rows in an order in which rows that begin alike follow each other."""

    rows: list[int]  # the rows' numbers
    common: list[int]  # the tokens that each row has in common with the next one, 0 if they are too few to share

    @classmethod
    def of(cls, rows: Iterable[int], beginnings: Sequence[Sequence[int]]) -> AlikeRows:
        """Sort rows by their beginnings; rows with equal beginnings keep their order.

        The last token of a beginning is never shared: the state after it predicts what follows.
        """
        sorted_rows = sorted(((tuple(beginnings[row]), row) for row in rows), key=lambda pair: pair[0])
        common = [_common(first, second) for (first, _), (second, _) in pairwise(sorted_rows)]
        return cls([row for _, row in sorted_rows], [count if count >= LEAST_SHARED else 0 for count in common])

    @property
    def share(self) -> bool:
        """Whether any two rows have a beginning to share."""
        return any(self.common)

    def prefix(self, start: int = 0, end: int | None = None) -> Prefix | None:
        """Return the prefix that saves the most tokens in a pass of the rows `start` to `end - 1`; None without any.

        The tokens saved by each run of rows are a rectangle in the histogram `common`: its width is the number of rows
        after the first, its height the length of their common beginning. So the largest rectangle is sought.
        """
        end = len(self.rows) if end is None else end
        saved, first, last, length = 0, 0, 0, 0
        rising: list[tuple[int, int]] = []  # the first row and the height of each rectangle that may still grow
        for place, height in enumerate([*self.common[start : max(start, end - 1)], 0], start):
            since = place
            while rising and rising[-1][1] >= height:
                since, tall = rising.pop()
                if tall * (place - since) > saved:
                    saved, first, last, length = tall * (place - since), since, place, tall
            rising.append((since, height))
        return Prefix(length, sorted(self.rows[first : last + 1])) if saved else None


def shared_prefix(beginnings: Sequence[Sequence[int]]) -> Prefix | None:
    """Return the prefix that saves the most tokens in one pass of rows; None without any.

    A row's beginning is what it may share, a prompt or a whole sequence, whose last token is not shared.
    """
    return AlikeRows.of(range(len(beginnings)), beginnings).prefix()


def common_to_all(beginnings: Sequence[Sequence[int]]) -> int:
    """Return how many tokens every pass of these rows computes once; 0 if they are too few to share."""
    rows = [tuple(beginning) for beginning in beginnings]
    count = min(_common(min(rows), max(rows)), min(map(len, rows)) - 1)
    return count if count >= LEAST_SHARED else 0


def in_passes_alike(rows: list[int], beginnings: Sequence[Sequence[int]], most: int) -> list[int]:
    """Return rows in an order in which passes of `most` rows share the most; unchanged if nothing can be shared."""
    if len(rows) <= most:
        return rows
    alike = AlikeRows.of(rows, beginnings)
    return alike.rows if alike.share else rows


def tokens_in_memory(tokens: int, saved: int) -> int:
    """Return by how many tokens a pass fills memory, of whose `tokens` tokens it does not compute `saved`."""
    return tokens - saved + -(-saved // REPEATED)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many tokens two beginnings have in common, without the last token of the shorter one."""
    most = max(0, min(len(first), len(second)) - 1)
    return bisect_left(range(most), True, key=lambda last: first[: last + 1] != second[: last + 1])
