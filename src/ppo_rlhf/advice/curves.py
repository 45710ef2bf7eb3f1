"""A run as the rules see it: its settings and its metrics, smoothed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.comparison import LEVELS, Verdict
from ppo_rlhf.evaluation.since_best import CHANCE
from ppo_rlhf.ppo.kl_rules import KLSituation

WINDOW = 10
"""Iterations, at most, that a mean is taken over."""
FIRST_RESPONSES = 64
"""Responses that the start of a run is measured by: with fewer, the noise of one batch would count."""


def in_digits(value: float) -> str:
    """Return a number with three digits, of a large one all before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


class Run(KLSituation):
    """The settings and the metrics of a run. Values that are not finite are left out; an unmeasured level is NaN.

    Iterations in which only the critic trains (`critic_warmup_iterations`) are left out.

    `rows` has one mapping for each iteration, in any order: metrics by key, and `iteration` (from 1) if known. NaN,
    None and a missing key mean that the metric was not measured.
    """

    def __init__(self, config: PPOConfig, rows: Iterable[Mapping[str, Any]]) -> None:
        table = pd.DataFrame([{"iteration": place, **row} for place, row in enumerate(rows, start=1)], dtype=float)
        if len(table):
            table = table.sort_values("iteration")[lambda t: t["iteration"] > config.critic_warmup_iterations]
        self._table = table.replace([math.inf, -math.inf], math.nan)
        self.iterations = len(table)
        self.window = max(1, min(WINDOW, self.iterations // 4))
        self._start = min(self.window, math.ceil(FIRST_RESPONSES / config.batch_size))
        super().__init__(
            config,
            kl=self.last("objective/kl"),
            kl_error=float(self.values("objective/kl").tail(self.window).sem()),
            highest_kl=self.highest("objective/kl"),
            kl_coef=self.last("objective/kl_coef"),
        )
        # a sparse reward may begin with zeros
        self.deviation = self.start("objective/scores_std") or self.highest("objective/scores_std")

    def values(self, key: str) -> pd.Series:
        """Return the metric at each iteration, NaN where it was not measured."""
        return self._table[key] if key in self._table else pd.Series(math.nan, self._table.index, dtype=float)

    def last(self, key: str) -> float:
        """Return the mean of the last window."""
        return float(self.values(key).tail(self.window).mean())

    def typical(self, key: str) -> float:
        """Return the median of the run, which neither a large first iteration nor a decaying learning rate decides."""
        return float(self.values(key).median())

    def start(self, key: str) -> float:
        """Return the mean over the first iterations, as few as hold `FIRST_RESPONSES` responses."""
        return float(self.values(key).head(self._start).mean())

    def highest(self, key: str) -> float:
        """Return the largest mean of any window."""
        return float(self._window_means(key).max())

    def end(self, key: str) -> float:
        """Return the last measured value, as of an evaluation."""
        measured = self.values(key).dropna()
        return float(measured.iloc[-1]) if len(measured) else math.nan

    @property
    def cut_off(self) -> str:
        """How many responses are cut off, and were at the start, in words."""
        now, first = (100.0 * level("response/truncated_fraction") for level in (self.last, self.start))
        which = "All" if now == 100.0 else f"{now:.3g}% of the"
        return f"{which} responses are cut off ({first:.3g}% at the start)"

    def _window_means(self, key: str) -> pd.Series:
        return self.values(key).rolling(self.window, min_periods=1).mean().iloc[self.window - 1 :]

    @property
    def gain(self) -> float:
        """Rise of the score over the SFT policy's, in standard deviations of the scores at the start.

        From the last evaluation if there was one, which has the same prompts and noise for both; else from training.
        """
        rise = self.end("eval/reward") - self.end("eval/reward_sft")
        if math.isnan(rise):
            rise = self.last("objective/scores") - self.start("objective/scores")
        return rise / self.deviation if self.deviation > 0.0 else math.nan

    @property
    def walked(self) -> float:
        """KL from the start that all updates would come to if none undid another, nats per response.

        Squared steps in unlike directions add up. policy/approxkl_avg is the mean over an iteration's optimiser steps,
        each measured before it is taken: on a straight way step k of S has (k/S)^2 of the iteration's KL behind it. NaN
        with one step an iteration, which is measured before the policy moved.
        """
        steps = self.config.num_ppo_epochs * self.config.num_mini_batches
        if steps == 1:
            return math.nan
        share = (steps - 1) * (2 * steps - 1) / (6 * steps**2)
        per_token = float(self.values("policy/approxkl_avg").mean()) * self.iterations / share
        return per_token * float(self.values("response/length").mean())

    @property
    def fell(self) -> bool:
        """Whether the score that decides the win rate fell for certain since its best evaluation, SFT's included."""
        return self.end("eval/since_best_p") < CHANCE

    @property
    def succeeded(self) -> bool:
        """Whether the verdict names PPO the winner, and that score did not fall since its best."""
        return self.end("eval/verdict") > 0.0 and not self.fell

    @property
    def judged_success(self) -> bool:
        """Whether it is a judge of its own who says so: a reward that is exploited calls that a success.

        A checker of answers that is both reward and judge, as GSM8K's, counts as the reward: settings do not tell a
        checker from a reward that can be exploited, and a checker can be, for example by a guess without a reason.
        """
        return self.succeeded and self.end("eval/verdict") == LEVELS[Verdict.BETTER]

    @property
    def rollout_gap(self) -> float:
        """Gap between the sampler's and the trained log-probabilities: at first or at the end, the larger one."""
        key = "policy/rollout_logprob_gap"
        return float(np.fmax(self.values(key).head(1).mean(), self.last(key)))
