"""Rules on the KL from the reference policy: the condition of each rule, its meaning, and the setting to change first.

The alarms during a run and the advice at the end of a run (`advice`) use `KL_RULES`. The advice leaves out the rule
`collapsed`, since no run is known in which changing a setting helped against a collapsed KL.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.rules import Change, Rule
from ppo_rlhf.core.errors import ConfigError

MOVED, COLLAPSED = 0.5, 0.1
"""KL has collapsed if the highest mean KL was at least `MOVED` nats per response, so that the policy had moved, and the
current mean KL is below `COLLAPSED` times the highest mean KL."""
NEGATIVE, STANDARD_ERRORS = -0.05, 3.0
"""KL counts as negative if the mean KL is below `NEGATIVE` nats per response and more than `STANDARD_ERRORS` standard
errors below 0: the estimate k1 is noisy around 0."""
USUAL_KL, USUAL_KL_COEF = 10.0, 0.05
"""TRL's FAQ keeps KL between 0 and 10 nats per response. `USUAL_KL_COEF` is TRL's default KL coefficient, for scores of
standard deviation 1."""
BETTER_START, SATURATED = 1.5, 10.0
"""Limits on the ratio of the controller's current KL coefficient to `ppo.kl_coef`, or on the inverse ratio if KL is
below `ppo.kl_target`. Above a ratio of `BETTER_START` the current KL coefficient is a better `ppo.kl_coef`. Above a
ratio of `SATURATED` no KL coefficient helps: the size of the updates keeps KL from its target."""


def allowed(change: Change | None, config: PPOConfig) -> Change | None:
    """Return `change` if it changes the value and the new configuration is valid, else None."""
    if change is None:
        return None
    value = change.value if change.factor is None else change.now * change.factor
    value = round(value) if isinstance(change.now, int) else value
    try:
        replace(config, **{change.setting: value})
    except ConfigError:
        return None
    return change if value != change.now else None


@dataclass
class KLSituation:
    """A run's KL and KL coefficient at some iteration; KL is in nats per response."""

    config: PPOConfig
    kl: float  # KL from the reference policy: of one iteration, or the mean of several
    kl_error: float  # standard error of the mean KL; NaN for a single iteration
    highest_kl: float  # highest mean KL so far; NaN for a single iteration
    kl_coef: float  # the KL controller's current coefficient

    @property
    def adaptive(self) -> bool:
        """Whether the run's KL controller adapts the KL coefficient."""
        return self.config.kl_controller == "adaptive"


def set_to(s: KLSituation, setting: str, value: Any) -> Change:
    """Return the change that sets a setting to a value."""
    return Change(setting, getattr(s.config, setting), value=value)


def scaled(s: KLSituation, setting: str, factor: float) -> Change:
    """Return the change that multiplies a setting by a factor."""
    return Change(setting, getattr(s.config, setting), factor)


def stronger_penalty(s: KLSituation, factor: float) -> Change:
    """Return the change that lowers KL by about `factor`: KL falls about as fast as the coefficient rises."""
    if s.adaptive:
        return scaled(s, "kl_target", 1.0 / factor)
    return scaled(s, "kl_coef", factor) if s.config.kl_coef else set_to(s, "kl_coef", USUAL_KL_COEF)


def lower_kl(s: KLSituation) -> Change:
    """Return the change that brings KL down to about `USUAL_KL`.

    If an adaptive controller's `kl_target` is below `kl_warning`, the change helps the controller reach the target.
    """
    if s.adaptive and s.config.kl_target < s.config.kl_warning:
        return help_controller(s)
    return stronger_penalty(s, min(4.0, max(1.5, s.kl / USUAL_KL)))


def help_controller(s: KLSituation) -> Change:
    """Return the change of `kl_coef`, `kl_horizon` or `learning_rate` that brings KL nearer to `kl_target`."""
    too_high, factor = s.kl > s.config.kl_target, s.kl_coef / s.config.kl_coef
    # Factor by which the controller has moved kl_coef in the right direction
    moved = factor if too_high else 1.0 / factor
    if BETTER_START < moved <= SATURATED:
        return scaled(s, "kl_coef", factor)
    if moved <= SATURATED and s.config.kl_horizon > 2 * s.config.batch_size:
        return scaled(s, "kl_horizon", 0.5)
    return scaled(s, "learning_rate", 0.5 if too_high else 2.0)


def without_filter(s: KLSituation) -> Change | None:
    """Return the change that turns off a sampling filter, or None if all sampling filters are off."""
    off = {"top_k": 0, "top_p": 1.0, "min_response_length": 0}
    return next((set_to(s, name, value) for name, value in off.items() if getattr(s.config, name) != value), None)


KL = "objective/kl"
KL_RULES: dict[str, Rule[KLSituation]] = {
    "negative": Rule(
        reads=(KL, "ppo.top_k", "ppo.top_p", "ppo.min_response_length"),
        holds=lambda s: s.kl < NEGATIVE and s.kl < -STANDARD_ERRORS * s.kl_error,
        seen=lambda s: f"KL is {s.kl:.3g} nats per response, below 0 by more than its noise",
        meaning="responses are not sampled from the distribution that PPO trains, and the KL penalty rewards that; "
        "check policy/rollout_logprob_gap, too",
        change=without_filter,
    ),
    "alarm": Rule(
        reads=(KL, "ppo.kl_alarm"),
        holds=lambda s: s.kl > s.config.kl_alarm,
        seen=lambda s: f"KL is {s.kl:.3g} nats per response, above {s.config.kl_alarm:g}",
        meaning="the policy has left the SFT model's language, most likely to exploit the reward",
        change=lower_kl,
    ),
    "warning": Rule(
        reads=(KL, "ppo.kl_warning", "ppo.kl_alarm"),
        holds=lambda s: s.config.kl_warning < s.kl <= s.config.kl_alarm,
        seen=lambda s: f"KL is {s.kl:.3g} nats per response, above {s.config.kl_warning:g}",
        meaning="the policy is leaving the SFT model's language; read the samples",
        change=lower_kl,
    ),
    "collapsed": Rule(
        reads=(KL,),
        holds=lambda s: s.highest_kl >= MOVED and s.kl < COLLAPSED * s.highest_kl,
        seen=lambda s: f"KL fell from {s.highest_kl:.3g} to {s.kl:.3g} nats per response",
        meaning="the policy is back where it started: the penalty outweighs the score, or without a penalty its "
        "updates undo each other",
    ),
}

WINDOW, WINDOW_RESPONSES = 10, 80
"""Smallest number of iterations, and of responses, in each mean of the KL. With fewer responses noise alone is often
"negative" or "collapsed"."""


def _averaged_iterations(config: PPOConfig) -> int:
    """Return the number of iterations in a mean that an alarm reads.

    There are `WINDOW` iterations, or more if the batch is so small that they have fewer than `WINDOW_RESPONSES`
    responses.
    """
    return max(WINDOW, math.ceil(WINDOW_RESPONSES / config.batch_size))


class KLAlarms:
    """The KL rules of a run, iteration by iteration, from the last means of the KL and the highest one."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._kl: deque[float] = deque(maxlen=_averaged_iterations(config))
        self._highest, self._held = 0.0, frozenset[str]()

    def after(self, row: Mapping[str, float]) -> list[str]:
        """Return one line for each rule that began to hold in an iteration, with the setting to change first.

        `row` has the iteration's metrics.
        """
        before, lines = self._held, []
        holding = self._holding(row)
        self._held = frozenset(holding)
        for name, situation in holding.items():
            # Do not warn if KL fell from above `kl_alarm` to between `kl_warning` and `kl_alarm`
            if name in before or (name == "warning" and "alarm" in before):
                continue
            rule = KL_RULES[name]
            change = allowed(rule.change(situation), self._config)
            first = f" {change}" if change else ""
            lines.append(f"KL {name}: {rule.seen(situation)}; {rule.meaning}.{first}")
        return lines

    def _holding(self, row: Mapping[str, float]) -> dict[str, KLSituation]:
        """Return the names of the KL rules that hold after an iteration, each with the KL that it was checked on.

        `alarm` and `warning` compare the iteration's KL. The other rules compare the mean of the last
        `_averaged_iterations`.
        """
        self._kl.append(row["objective/kl"])
        config, kl_coef = self._config, row["objective/kl_coef"]
        situations = dict.fromkeys(("alarm", "warning"), KLSituation(config, self._kl[-1], math.nan, math.nan, kl_coef))
        if len(self._kl) == self._kl.maxlen:
            recent_kl = np.array(self._kl)
            mean, error = float(recent_kl.mean()), float(recent_kl.std(ddof=1)) / math.sqrt(len(recent_kl))
            self._highest = float(np.nanmax([self._highest, mean]))
            recent = KLSituation(config, mean, error, self._highest, kl_coef)
            situations |= dict.fromkeys(("collapsed", "negative"), recent)
        return {name: situation for name, situation in situations.items() if KL_RULES[name].holds(situation)}
