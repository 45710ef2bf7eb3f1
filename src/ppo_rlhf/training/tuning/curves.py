"""The curves of a run, smoothed: what a rule of the tuning advice looks at. NaN stands for what was not measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

WINDOW = 10
"""Iterations, at most, of a mean. KL is judged by the mean of the last ten wherever this project measures it."""
FIRST_RESPONSES = 64
"""Responses whose mean is a run's starting level: with fewer, one batch's noise would pass for learning."""


class Curves:
    """Metrics by iteration. Every mean leaves out what is not finite; a comparison with a NaN level is False.

    Args:
        rows: One mapping an iteration, in any order: metrics by key, `iteration` from 1 if known. NaN, None and a
            missing key all mean that the metric was not measured.
        batch_size: Responses of one iteration.
        skipped: Iterations at the start in which the policy stands still; they are left out.
    """

    def __init__(self, rows: Iterable[Mapping[str, float]], batch_size: int, skipped: int = 0) -> None:
        numbered = sorted(
            ((row.get("iteration", place), row) for place, row in enumerate(rows, start=1)), key=lambda pair: pair[0]
        )
        self._rows = [row for iteration, row in numbered if iteration > skipped]
        self._start = min(self.window, math.ceil(FIRST_RESPONSES / batch_size))

    @property
    def iterations(self) -> int:
        """Iterations that were measured."""
        return len(self._rows)

    @property
    def window(self) -> int:
        """Iterations of a smoothing window: ten, or a quarter of a shorter run, but at least one."""
        return max(1, min(WINDOW, len(self._rows) // 4))

    def values(self, key: str) -> NDArray[np.float64]:
        """Return the metric at each iteration, not finite where it was not measured."""
        found = (row.get(key) for row in self._rows)
        return np.array([math.nan if value is None else value for value in found], dtype=np.float64)

    def last(self, key: str) -> float:
        """Return the mean of the last window."""
        return _mean(self.values(key)[-self.window :])

    def median(self, key: str) -> float:
        """Return the median of the last window: half of its iterations are at least there, whatever the others are."""
        values = self.values(key)[-self.window :]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else math.nan

    def start(self, key: str) -> float:
        """Return the mean of the first iterations, as few as hold `FIRST_RESPONSES` responses."""
        return _mean(self.values(key)[: self._start])

    def start_above_zero(self, key: str) -> float:
        """Return `start`, or where that is 0 the same from the first iteration above 0 on; 0 if there is none."""
        values, start = self.values(key), self.start(key)
        above = np.flatnonzero(np.isfinite(values) & (values > 0.0))
        if start != 0.0 or not len(above):
            return start
        return _mean(values[above[0] : above[0] + self._start])

    def highest(self, key: str) -> float:
        """Return the largest mean of a window anywhere in the run."""
        means = self._means(key)
        return float(means.max()) if len(means) else math.nan

    def lowest(self, key: str) -> float:
        """Return the smallest mean of a window anywhere in the run."""
        means = self._means(key)
        return float(means.min()) if len(means) else math.nan

    def standard_error(self, key: str) -> float:
        """Return the standard error of `last`: the deviation of the last window's values / √(their number)."""
        values = self.values(key)[-self.window :]
        values = values[np.isfinite(values)]
        return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan

    def evaluations(self, *keys: str) -> list[tuple[float, ...]]:
        """Return the metrics of each evaluation that measured all of them, in order of iteration."""
        table = np.stack([self.values(key) for key in keys], axis=-1)
        return [tuple(map(float, row)) for row in table if np.isfinite(row).all()]

    def _means(self, key: str) -> NDArray[np.float64]:
        values, ones = self.values(key), np.ones(self.window)
        if len(values) < self.window:
            return values[:0]
        finite = np.isfinite(values)
        counts = np.convolve(finite, ones, mode="valid")
        sums = np.convolve(np.where(finite, values, 0.0), ones, mode="valid")
        return sums[counts > 0] / counts[counts > 0]


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
