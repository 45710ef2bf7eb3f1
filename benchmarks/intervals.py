"""The 95 % interval of a mean over seeds."""

from __future__ import annotations

from math import sqrt
from statistics import mean, stdev

from scipy.stats import t as student


def with_interval(values: list[float], digits: int = 3) -> str:
    """Return the mean over seeds and half of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f} (one seed)"
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return f"{mean(values):.{digits}f} ± {half:.{digits}f}"
