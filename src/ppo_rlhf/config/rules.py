"""A rule over facts, such as settings or a run's metrics, and the change of a setting that a rule proposes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Change:
    """A change of a PPOConfig setting: multiply its present value `now` by about `factor`, or set it to `value`."""

    setting: str
    now: Any
    factor: float | None = None
    value: Any = None

    def __str__(self) -> str:
        """Return the change as an instruction to the user."""
        name = f"ppo.{self.setting}"
        if self.factor is None:
            return f"Set {name} to {self.value} (now {self.now})."
        if self.factor in (0.5, 2.0):
            return f"{'Halve' if self.factor < 1.0 else 'Double'} {name} (now {self.now:g})."
        verb, factor = ("Lower", 1.0 / self.factor) if self.factor < 1.0 else ("Raise", self.factor)
        return f"{verb} {name} by about a factor of {factor:.2g} (now {self.now:g})."


@dataclass(frozen=True)
class Rule(Generic[Facts]):
    """A condition on facts, and what the user reads if the condition holds."""

    reads: tuple[str, ...]  # settings as ppo.<name>, and metric keys
    holds: Callable[[Facts], bool]
    seen: Callable[[Facts], str]  # returns the facts in words: the first half of the sentence
    meaning: str = ""  # the reason, and the fix if `change` has none: the second half; empty if `seen` says everything
    # Returns the change of a setting to try first; None if no setting helps
    change: Callable[[Facts], Change | None] = lambda _: None
