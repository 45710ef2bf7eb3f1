"""Alarms on the KL from the reference policy: one line each, once for each time that the KL crosses a limit.

What a line says follows the order of the usual tuning advice: control the KL first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError

WINDOW = 10  # iterations in the running mean
COLLAPSED_SHARE = 0.1  # of the highest running mean so far
WORTH_WATCHING = 0.5  # nats per response; a KL that never got there has nothing to collapse from
NEGATIVE = -0.05  # nats per response
STANDARD_ERRORS = 3.0  # k1 is noisy around 0: a running mean must lie this far below it to count as negative


class KLAlarms:
    """Watches `objective/kl` (k1, nats per response) and says once what a crossing means and what to change first.

    A limit can be crossed again after the KL came back from it.

    Attributes:
        recent: KL of the last iterations, at most WINDOW.
        highest: Highest running mean so far.
        raised: Names of the alarms that stand.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.recent: list[float] = []
        self.highest = 0.0
        self.raised: set[str] = set()

    def check(self, kl: float) -> list[str]:
        """Take in one iteration's KL and return a line for each limit that it crossed."""
        self.recent = [*self.recent, kl][-WINDOW:]
        mean = sum(self.recent) / len(self.recent)
        if len(self.recent) == WINDOW:
            self.highest = max(self.highest, mean)
        conditions: dict[str, tuple[bool, Callable[[float, float], str]]] = {
            "alarm": (kl > self.config.kl_alarm, self._alarm),
            "warning": (self.config.kl_warning < kl <= self.config.kl_alarm, self._warning),
            "collapsed": (self._collapsed(mean), self._collapse),
            "negative": (self._negative(mean), self._negative_mean),
        }
        lines = [say(kl, mean) for name, (holds, say) in conditions.items() if holds and name not in self.raised]
        standing = {name for name, (holds, _) in conditions.items() if holds}
        if "alarm" in standing:  # on the way down from an alarm there is nothing new to warn of
            standing.add("warning")
        self.raised = standing
        return lines

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, JSON-able."""
        return {"recent": self.recent, "highest": self.highest, "raised": sorted(self.raised)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`'s result; raise CheckpointError if it holds other keys."""
        if set(state) != {"recent", "highest", "raised"}:
            raise CheckpointError(
                f"KLAlarms.load_state_dict: got the keys {sorted(state)}; highest, raised and recent are expected. "
                "The state belongs to something else: give the checkpoint's KL alarms."
            )
        self.recent, self.highest, self.raised = list(state["recent"]), float(state["highest"]), set(state["raised"])

    def _collapsed(self, mean: float) -> bool:
        watched = len(self.recent) == WINDOW and self.highest >= WORTH_WATCHING
        return watched and mean < COLLAPSED_SHARE * self.highest

    def _negative(self, mean: float) -> bool:
        if len(self.recent) < WINDOW or mean >= NEGATIVE:
            return False
        variance = sum((kl - mean) ** 2 for kl in self.recent) / (WINDOW - 1)
        return mean < -STANDARD_ERRORS * math.sqrt(variance / WINDOW)

    def _alarm(self, kl: float, mean: float) -> str:
        return (
            f"KL alarm: {kl:.3g} nats per response, above ppo.kl_alarm={self.config.kl_alarm:g}. The policy has most "
            f"likely left the reference to exploit the reward: read the samples, and "
            f"{self._tighten(self.config.kl_alarm)} first, then lower ppo.learning_rate."
        )

    def _warning(self, kl: float, mean: float) -> str:
        return (
            f"KL warning: {kl:.3g} nats per response, above ppo.kl_warning={self.config.kl_warning:g}. The policy is "
            f"drifting fast; if the samples look worse, {self._tighten(self.config.kl_warning)} first, then lower "
            "ppo.learning_rate."
        )

    def _collapse(self, kl: float, mean: float) -> str:
        why = "The penalty has pulled the policy back onto the reference: "
        if self.config.kl_controller == "adaptive":
            why += "start from a smaller ppo.kl_coef, or shorten ppo.kl_horizon, first."
        elif self.config.kl_coef > 0.0:
            why += "lower ppo.kl_coef first."
        else:
            why = "No penalty holds the policy, so its updates have undone each other: lower ppo.learning_rate first."
        return (
            f"KL collapsed: {mean:.2g} nats per response on average over {WINDOW} iterations, after {self.highest:.3g}."
            f" {why}"
        )

    def _negative_mean(self, kl: float, mean: float) -> str:
        return (
            f"KL is negative: {mean:.2g} nats per response on average over {WINDOW} iterations. A true KL cannot be; "
            "responses are not drawn from the distribution that is trained. Set ppo.top_k=0, ppo.top_p=1 and "
            "ppo.min_response_length=0 first, then look at policy/rollout_logprob_gap."
        )

    def _tighten(self, limit: float) -> str:
        """Say what holds the policy closer, as the advice at the run's end does (training.tuning)."""
        if self.config.kl_controller == "fixed":
            return "raise ppo.kl_coef"
        if self.config.kl_target < limit:  # the target is not at fault: the controller came too late
            return "start from a larger ppo.kl_coef, or shorten ppo.kl_horizon,"
        return "lower ppo.kl_target"
