"""What a rule of the tuning advice is made of: its stage in the guide, its threshold with a source, its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.training.tuning.curves import Curves


class Stage(Enum):
    """The tuning guide's order: what is changed first, because what comes later cannot mend it."""

    BEFORE = "before tuning"
    """The numbers themselves are wrong, so no setting should be judged by them."""
    KL = "KL"
    LEARNING_RATES = "learning rates and batch sizes"
    EPOCHS = "epochs and clipping"
    REWARD = "reward and responses"


@dataclass(frozen=True)
class Change:
    """The setting of PPOConfig to move first, and where to."""

    setting: str
    now: Any
    next: Any

    def __str__(self) -> str:
        """Write it as an instruction."""
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (self.now, self.next))
        if not numbers:
            return f"Set ppo.{self.setting} to {self.next} (now {self.now})."
        verb = "Raise" if self.next > self.now else "Lower"
        return f"{verb} ppo.{self.setting} from {self.now:g} to {self.next:g}."


@dataclass(frozen=True)
class Finding:
    """What a check saw: the numbers in words, and the change that they call for; None if no setting mends it."""

    seen: str
    change: Change | None = None
    meaning: str | None = None
    """What it means in this run, where that is not what the rule's finding usually means."""


@dataclass(frozen=True)
class Run:
    """What there is to judge: the settings, and the curves without the iterations of the critic's warm-up."""

    config: PPOConfig
    curves: Curves

    @property
    def spread(self) -> float:
        """Standard deviation of the scores at the start, in the units that the KL penalty is weighed against."""
        if self.config.reward_normalisation != "none":
            return self.config.reward_scale
        return self.curves.start_above_zero("objective/scores_std") * self.config.reward_scale

    @property
    def gain(self) -> float:
        """Rise of the score over the SFT policy's, in standard deviations of the scores at the start.

        Of the last evaluation if there was one: the same prompts and noise for both. Else of the training curve.
        """
        evaluated = self.curves.evaluations("eval/reward", "eval/reward_sft")
        rise = self.curves.last("objective/scores") - self.curves.start("objective/scores")
        if evaluated:
            reward, reward_sft = evaluated[-1]
            rise = reward - reward_sft
        deviation = self.curves.start_above_zero("objective/scores_std")
        return rise / deviation if deviation > 0.0 else float("nan")

    def scaled(self, setting: str, factor: float) -> Change:
        """Return the change that multiplies a setting, rounded to two digits; a whole number stays one."""
        now = getattr(self.config, setting)
        moved = rounded(now * factor)
        return Change(setting, now, max(1, round(moved)) if isinstance(now, int) else moved)

    def allows(self, change: Change) -> bool:
        """Return whether the configuration with the change is valid, rules between fields included."""
        try:
            replace(self.config, **{change.setting: change.next})
        except ValueError:
            return False
        return True


Check = Callable[[Run, float], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One line of the table: when it speaks, on whose authority, and what it usually means."""

    name: str
    stage: Stage
    looks_at: tuple[str, ...]
    """Metric keys; settings as ppo.<name>."""
    threshold: float | str
    """A number, or the setting of PPOConfig that holds it."""
    source: str
    """Where the threshold comes from."""
    meaning: str
    """What a value beyond the threshold usually means."""
    check: Check
    """Returns what it saw; None if the threshold is kept or the curves do not say."""
    iterations: int = 10
    """Fewest iterations to judge by; 0 for a rule on settings alone."""

    def apply(self, run: Run) -> Finding | None:
        """Return the rule's finding on a run, None if there is none or the run is too short for it."""
        if run.curves.iterations < self.iterations:
            return None
        threshold = getattr(run.config, self.threshold) if isinstance(self.threshold, str) else self.threshold
        finding = self.check(run, float(threshold))
        if finding and finding.change and finding.change.next == finding.change.now:
            return replace(finding, change=None)
        return finding


def number(value: float) -> str:
    """Return a number for a sentence: three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def rounded(value: float) -> float:
    """Return a value that a person would type: two digits."""
    return float(f"{value:.2g}")
