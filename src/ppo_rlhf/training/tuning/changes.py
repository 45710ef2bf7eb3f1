"""Changes of one setting, and the new values that need more than a factor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.training.tuning.curves import Run

MOVED = 0.5
"""Nats per response. Below it the policy has hardly moved (ppo.alarms has the same number)."""
USUAL_KL = 10.0
"""Nats per response to aim at: TRL's FAQ keeps KL between 0 and 10."""
USUAL_KL_COEF = 0.05
"""TRL's default, for scores of standard deviation 1."""
USUAL_ENTROPY_COEF = 0.01
"""arXiv:1707.06347, table 5."""
BETTER_START, SATURATED = 1.5, 10.0
"""Factors of the first KL coefficient: from the one on, the controller's is a better start; from the other on, the size
of the updates keeps KL from its target."""
LEARNING_UPDATE, CALM_UPDATE = 1e-3, 0.02
"""policy/approxkl_avg to aim at, nats per token. It grows with the square of the learning rate."""


@dataclass(frozen=True)
class Change:
    """A setting of PPOConfig, its present value, and the value to try."""

    setting: str
    now: Any
    next: Any

    def __str__(self) -> str:
        """Write it as an instruction."""
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (self.now, self.next)):
            return f"Set ppo.{self.setting} to {self.next} (now {self.now})."
        verb = "Raise" if self.next > self.now else "Lower"
        return f"{verb} ppo.{self.setting} from {self.now:g} to {self.next:g}."

    def is_opposite(self, other: Change) -> bool:
        """Return whether another change moves the same setting the other way."""
        if self.now is None or isinstance(self.now, str):
            return bool(self.next != other.next)
        return bool((self.next > self.now) != (other.next > other.now))

    def is_allowed(self, run: Run) -> bool:
        """Return whether it changes anything and leaves a valid configuration."""
        try:
            replace(run.config, **{self.setting: self.next})
        except ConfigError:
            return False
        return bool(self.next != self.now)


def set_to(r: Run, setting: str, value: Any) -> Change:
    """Set a setting to a value."""
    return Change(setting, getattr(r.config, setting), value)


def scaled(r: Run, setting: str, factor: float) -> Change:
    """Multiply a setting, rounded to two digits; a whole number stays one."""
    now = getattr(r.config, setting)
    moved = rounded(now * factor)
    return Change(setting, now, max(1, round(moved)) if isinstance(now, int) else moved)


def stronger_penalty(r: Run, factor: float) -> Change:
    """Hold the policy closer. KL falls about as fast as the coefficient rises."""
    if r.adaptive:
        return scaled(r, "kl_target", 1.0 / factor)
    if r.config.kl_coef == 0.0:
        return set_to(r, "kl_coef", float(f"{USUAL_KL_COEF * (r.spread or 1.0):.1g}"))
    return scaled(r, "kl_coef", factor)


def lower_kl(r: Run) -> Change:
    """Bring KL down to the usual level."""
    if r.adaptive and r.config.kl_target < r.config.kl_warning:
        return help_controller(r)
    return stronger_penalty(r, clamped(r.kl / USUAL_KL, 1.5, 4.0))


def help_controller(r: Run) -> Change:
    """Bring KL nearer to the target: another step size, a better start, or a quicker controller."""
    too_high, moved = r.kl > r.config.kl_target, r.last("objective/kl_coef") / r.config.kl_coef
    moved = moved if too_high else 1.0 / moved
    if moved <= SATURATED and moved > BETTER_START:
        return set_to(r, "kl_coef", rounded(r.last("objective/kl_coef")))
    if moved <= SATURATED and r.config.kl_horizon > 2 * r.config.batch_size:
        return scaled(r, "kl_horizon", 0.5)
    return scaled(r, "learning_rate", 0.5 if too_high else 2.0)


def weaker_penalty(r: Run) -> Change:
    """Let the policy move after KL collapsed; without a penalty its updates are too large."""
    if r.adaptive:
        return help_controller(r)
    return scaled(r, "kl_coef" if r.config.kl_coef else "learning_rate", 0.5)


def without_filter(r: Run) -> Change | None:
    """Turn off a filter of the sampler, if one is on."""
    off = {"top_k": 0, "top_p": 1.0, "min_response_length": 0}
    return next((set_to(r, name, value) for name, value in off.items() if getattr(r.config, name) != value), None)


def more_entropy(r: Run) -> Change:
    """Hold the policy closer, or pay for entropy if KL is low already."""
    if r.kl < MOVED:
        return set_to(r, "entropy_coef", max(USUAL_ENTROPY_COEF, 2 * r.config.entropy_coef))
    return stronger_penalty(r, 1.5)


def rate_for_update(r: Run, size: float, least: float, most: float) -> Change:
    """Set the learning rate by which an update has a size: policy/approxkl_avg grows with its square."""
    now = r.highest("policy/approxkl_avg")
    return scaled(r, "learning_rate", clamped(math.sqrt(size / now) if now > 0.0 else least, least, most))


def critic_rate(r: Run, factor: float) -> Change:
    """Change how fast the critic learns: its learning rate, or its weight in the loss of a shared trunk."""
    if r.config.value_model == "shared":
        return scaled(r, "vf_coef", factor)
    now = r.config.value_learning_rate or r.config.learning_rate
    return Change("value_learning_rate", now, rounded(now * factor))


def less_truncation(r: Run) -> Change:
    """Penalise truncated responses, unless SFT's were as long already or a penalty is excluded."""
    now = r.config.missing_eos_penalty
    penalty = set_to(r, "missing_eos_penalty", rounded(2.0 * now if now else r.spread))
    if r.start("response/truncated_fraction") > 0.5 or not penalty.next > 0.0 or not penalty.is_allowed(r):
        return scaled(r, "response_length" if r.config.turn_length is None else "turn_length", 1.5)
    return penalty


def clamped(value: float, low: float, high: float) -> float:
    """Return the value, or the nearer bound outside of them."""
    return min(high, max(low, value))


def rounded(value: float) -> float:
    """Return a value of two digits."""
    return float(f"{value:.2g}")
