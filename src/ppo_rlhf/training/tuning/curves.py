"""A run as the rules see it: its settings and its metrics, smoothed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_rlhf.config import PPOConfig

WINDOW = 10
"""Iterations, at most, that a mean is taken over."""
FIRST_RESPONSES = 64
"""Responses that the start of a run is measured by: with fewer, the noise of one batch would count."""


class Run:
    """The settings and the metrics of a run. Values that are not finite are left out; an unmeasured level is NaN.

    Iterations in which only the critic trains (`critic_warmup_iterations`) are left out.

    Args:
        config: The run's settings.
        rows: One mapping for each iteration, in any order: metrics by key, and `iteration` (from 1) if known. NaN,
            None and a missing key mean that the metric was not measured.
    """

    def __init__(self, config: PPOConfig, rows: Iterable[Mapping[str, Any]]) -> None:
        numbered = [(row.get("iteration", place), row) for place, row in enumerate(rows, start=1)]
        numbered.sort(key=lambda pair: pair[0])
        self.config = config
        self._rows = [row for iteration, row in numbered if iteration > config.critic_warmup_iterations]
        self.iterations = len(self._rows)
        self.window = max(1, min(WINDOW, self.iterations // 4))
        self._start = min(self.window, math.ceil(FIRST_RESPONSES / config.batch_size))

    def values(self, key: str) -> NDArray[np.float64]:
        """Return the metric at each iteration, NaN where it was not measured."""
        found = (row.get(key) for row in self._rows)
        values = np.array([math.nan if value is None else value for value in found], dtype=np.float64)
        return np.where(np.isfinite(values), values, math.nan)

    def last(self, key: str) -> float:
        """Return the mean of the last window."""
        return _mean(self.values(key)[-self.window :])

    def median(self, key: str) -> float:
        """Return the median of the last window."""
        values = _measured(self.values(key)[-self.window :])
        return float(np.median(values)) if len(values) else math.nan

    def standard_error(self, key: str) -> float:
        """Return the standard error of `last`."""
        values = _measured(self.values(key)[-self.window :])
        return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan

    def start(self, key: str) -> float:
        """Return the mean over the first iterations, as few as hold `FIRST_RESPONSES` responses."""
        return _mean(self.values(key)[: self._start])

    def start_above_zero(self, key: str) -> float:
        """Return `start`; if that is 0, the same mean from the first value above 0 on, or 0 if there is none."""
        values, start = self.values(key), self.start(key)
        above = np.flatnonzero(values > 0.0)
        if start != 0.0 or not len(above):
            return start
        return _mean(values[above[0] : above[0] + self._start])

    def highest(self, key: str) -> float:
        """Return the largest mean of any window."""
        return max(self._window_means(key), default=math.nan)

    def lowest(self, key: str) -> float:
        """Return the smallest mean of any window."""
        return min(self._window_means(key), default=math.nan)

    def evaluations(self, *keys: str) -> list[tuple[float, ...]]:
        """Return these metrics of each iteration that measured all of them."""
        table = np.stack([self.values(key) for key in keys], axis=-1)
        return [tuple(map(float, row)) for row in table if np.isfinite(row).all()]

    @property
    def kl(self) -> float:
        """KL at the end, nats per response."""
        return self.last("objective/kl")

    @property
    def adaptive(self) -> bool:
        """Whether a controller moves the KL coefficient."""
        return self.config.kl_controller == "adaptive"

    @property
    def spread(self) -> float:
        """Standard deviation of the scores at the start, as the KL penalty is weighed against them."""
        if self.config.reward_normalisation != "none":
            return self.config.reward_scale
        return self.start_above_zero("objective/scores_std") * self.config.reward_scale

    @property
    def gain(self) -> float:
        """Rise of the score over the SFT policy's, in standard deviations of the scores at the start.

        From the last evaluation if there was one, which has the same prompts and noise for both; else from training.
        """
        evaluated = self.evaluations("eval/reward", "eval/reward_sft")
        rise = self.last("objective/scores") - self.start("objective/scores")
        if evaluated:
            rise = evaluated[-1][0] - evaluated[-1][1]
        deviation = self.start_above_zero("objective/scores_std")
        return rise / deviation if deviation > 0.0 else math.nan

    def _window_means(self, key: str) -> list[float]:
        values = self.values(key)
        means = (_mean(values[i : i + self.window]) for i in range(len(values) - self.window + 1))
        return [mean for mean in means if math.isfinite(mean)]


def _measured(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _mean(values: NDArray[np.float64]) -> float:
    measured = _measured(values)
    return float(measured.mean()) if len(measured) else math.nan
