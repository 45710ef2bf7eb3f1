"""A run as the tuning rules see it: its settings and its smoothed metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.since_best import CHANCE
from ppo_rlhf.evaluation.verdict import LEVELS, Verdict
from ppo_rlhf.ppo.kl_alarms import KLSituation

WINDOW = 10
"""Largest number of iterations over which a metric is averaged."""
FIRST_RESPONSES = 64
"""Number of responses over which the metrics at the start of a run are averaged. With fewer responses, the noise of one
batch would decide."""


def in_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point from 1000 on."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


class Run(KLSituation):
    """The settings and the metrics of a run.

    Values that are not finite are ignored, and the level of a metric that was not measured is NaN. Iterations in which
    only the critic trains (`critic_warmup_iterations`) are left out.

    `rows` has one mapping for each iteration, in any order, with metrics by key and `iteration` (from 1) if known. NaN,
    None and a missing key mean that the metric was not measured.
    """

    def __init__(self, config: PPOConfig, rows: Iterable[Mapping[str, Any]]) -> None:
        table = pd.DataFrame([{"iteration": place, **row} for place, row in enumerate(rows, start=1)], dtype=float)
        if len(table):
            table = table.sort_values("iteration")[lambda t: t["iteration"] > config.critic_warmup_iterations]
        self._table = table.replace([math.inf, -math.inf], math.nan)
        self.iterations = len(table)
        self.planned = max(self.iterations, config.num_total_batches - config.critic_warmup_iterations)
        self.window = max(1, min(WINDOW, self.iterations // 4))
        self._start = min(self.window, math.ceil(FIRST_RESPONSES / config.batch_size))
        super().__init__(
            config,
            kl=self.last("objective/kl"),
            kl_error=float(self.values("objective/kl").tail(self.window).sem()),
            highest_kl=self.highest("objective/kl"),
            kl_coef=self.last("objective/kl_coef"),
        )
        # with a sparse reward all scores of the first iterations may be 0, and so may their standard deviation
        self.deviation = self.start("objective/scores_std") or self.highest("objective/scores_std")

    def values(self, key: str) -> pd.Series:
        """Return the metric at each iteration, and NaN where the metric was not measured."""
        return self._table[key] if key in self._table else pd.Series(math.nan, self._table.index, dtype=float)

    def last(self, key: str) -> float:
        """Return the metric's mean over the last iterations of the run."""
        return float(self.values(key).tail(self.window).mean())

    def typical(self, key: str) -> float:
        """Return the metric's median over the run.

        A large value in the first iteration or a decaying learning rate hardly changes the median.
        """
        return float(self.values(key).median())

    def start(self, key: str) -> float:
        """Return the metric's mean over the first iterations, just enough for `FIRST_RESPONSES` responses."""
        return float(self.values(key).head(self._start).mean())

    def highest(self, key: str) -> float:
        """Return the largest mean of the metric over any window of iterations."""
        return float(self._window_means(key).max())

    def end(self, key: str) -> float:
        """Return the metric's last measured value, for example the value at the last evaluation."""
        measured = self.values(key).dropna()
        return float(measured.iloc[-1]) if len(measured) else math.nan

    @property
    def cut_off(self) -> str:
        """Sentence with the share of truncated responses now and at the start."""
        now, first = (100.0 * level("response/truncated_fraction") for level in (self.last, self.start))
        which = "All" if now == 100.0 else f"{now:.3g}% of the"
        return f"{which} responses are cut off ({first:.3g}% at the start)"

    def _window_means(self, key: str) -> pd.Series:
        return self.values(key).rolling(self.window, min_periods=1).mean().iloc[self.window - 1 :]

    @property
    def gain(self) -> float:
        """Rise of the score over the SFT policy's, in standard deviations of the scores at the start.

        If the run was evaluated, the rise is that of the last evaluation, in which both policies answered the same
        prompts with the same noise. If not, the rise is computed from the training scores.
        """
        rise = self.end("eval/reward") - self.end("eval/reward_sft")
        if math.isnan(rise):
            rise = self.last("objective/scores") - self.start("objective/scores")
        return rise / self.deviation if self.deviation > 0.0 else math.nan

    @property
    def walked(self) -> float:
        """KL from the SFT policy, in nats per response, that all updates would add up to if no update undid another.

        KLs of steps in unrelated directions add up. policy/approxkl_avg is the mean over an iteration's optimiser
        steps, and each step is measured before it is taken: on a straight path, step k of S (k from 0) sees (k/S)^2 of
        the iteration's KL. With one optimiser step per iteration the value is NaN, because the step is measured before
        the policy has moved.
        """
        steps = self.config.num_ppo_epochs * self.config.num_mini_batches
        if steps == 1:
            return math.nan
        share = (steps - 1) * (2 * steps - 1) / (6 * steps**2)
        per_token = float(self.values("policy/approxkl_avg").mean()) * self.iterations / share
        return per_token * float(self.values("response/length").mean())

    @property
    def fell(self) -> bool:
        """Whether the score that decides the win rate fell significantly since its best evaluation (SFT's evaluation
        counts, too).
        """
        return self.end("eval/since_best_p") < CHANCE

    @property
    def succeeded(self) -> bool:
        """Whether the verdict names PPO the winner, and the deciding score did not fall since its best evaluation."""
        return self.end("eval/verdict") > 0.0 and not self.fell

    @property
    def judged_success(self) -> bool:
        """Whether the run succeeded by a judge that is not the trained reward.

        A trained reward also rises when the policy exploits the reward. A function that is both reward and judge, such
        as GSM8K's answer checker, counts as the trained reward: the settings do not show whether the function can be
        exploited, and even a checker can be, for example by guesses without reasoning.
        """
        return self.succeeded and self.end("eval/verdict") == LEVELS[Verdict.BETTER]

    @property
    def rollout_gap(self) -> float:
        """Gap between the sampler's and the trained log-probabilities: the larger one of the first and the last
        level.
        """
        key = "policy/rollout_logprob_gap"
        return float(np.fmax(self.values(key).head(1).mean(), self.last(key)))
