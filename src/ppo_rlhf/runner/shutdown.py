"""What a signal does to the iteration that it comes in: finish and save it if there is time."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from typing import Any, Protocol

from ppo_rlhf.runner.forecast import Forecast
from ppo_rlhf.runner.signals import TerminationSignal

CHECKPOINT = "checkpoint"
"""Output of the node that makes the next state: what it saves, if `due`, is all of that state."""

logger = logging.getLogger(__name__)


class LoopState(Protocol):
    """What the runner asks of the carried state."""

    iteration: int
    """Iterations completed."""
    total_iterations: int
    finished: bool
    stopping: bool
    """Set by the runner: the run ends after this iteration, which makes its checkpoint due."""
    shutdown_grace_s: float
    """How long after a signal the run may go on in order to save an iteration."""


class Shutdown:
    """Decides, for each moment of an iteration, what becomes of its state when the first signal comes.

    - Until the state is made and saved: the signal waits for that, if the forecast is within `shutdown_grace_s`. What
      lies behind (an evaluation) is left to the run that resumes.
    - Behind it the state is whole; if it was not due to be saved, it is saved first, if that fits.
    - Else, and before an iteration has been timed, the run stops at once: its last checkpoint stands.

    Attributes:
        forecast: Times the nodes.
        unsaved: What to save so that the newest state is not lost; None if there is no such state, or if it is saved.
    """

    def __init__(self, forecast: Forecast, say: Callable[[str], None]) -> None:
        """Take what times the iteration, and what logs a line from within a signal handler."""
        self.forecast = forecast
        self.unsaved: Any = None
        self._say = say
        self._state: LoopState | None = None
        self._number = 0
        self._may_wait = False
        self._waiting: int | None = None
        self._refusal = ""

    def iteration_starts(self, state: LoopState) -> None:
        """From now on a signal may wait for the iteration that makes the next state out of this one."""
        self.unsaved = None
        self._state, self._number = state, state.iteration + 1
        self._may_wait = True

    def state_is_made(self) -> int | None:
        """From now on no signal waits; return the one that does."""
        self._may_wait = False  # first: a signal that comes between these lines must not be told to wait
        return self._waiting

    def before_save(self, dataset_name: str, data: Any) -> None:
        """Note whether this saves the state."""
        if dataset_name != CHECKPOINT:
            return
        due = getattr(data, "due", True)
        if due:
            self.forecast.save_starts()
        self.unsaved = None if due else data

    def after_save(self, dataset_name: str) -> None:
        """Note that the state is saved, if it was due."""
        if dataset_name == CHECKPOINT:
            self.forecast.save_ends()

    def may_finish(self, signum: int) -> bool:
        """Return whether this signal, the first, waits until the state is saved; runs in the signal handler."""
        if not self._may_wait or self._state is None:
            return False
        seconds, grace, name = self.forecast.until_saved_s(), self._state.shutdown_grace_s, signal.Signals(signum).name
        if seconds is None:
            self._refusal = f"{name}: stopping now; no iteration is complete, so how long this one takes is not known."
            return False
        if seconds > grace:
            need = f"until iteration {self._number} is saved it would take about {math.ceil(seconds)} s"
            self._refusal = f"{name}: stopping now; {need}, and shutdown_grace_s is {grace:g}."
            return False
        self._waiting = signum
        self._state.stopping = True
        self._say(
            f"{name}: finishing iteration {self._number} (about {math.ceil(seconds)} s) and saving it, then stopping; "
            "a second signal stops at once."
        )
        return True

    def save_first(self, stop: TerminationSignal) -> bool:
        """Return whether to save what is unsaved before this signal ends the loop, and log a line on it.

        If one is waiting, this is its end, or a second one.
        """
        if self._waiting is not None or self._state is None:
            return False
        if self.unsaved is None:
            if self._refusal:
                logger.info("%s", self._refusal)
            return False
        name, seconds, grace = signal.Signals(stop.signum).name, self.forecast.save_s(), self._state.shutdown_grace_s
        if seconds > grace:
            lost = f"stopping now without saving iteration {self._number}, which would take about"
            logger.info("%s: %s %d s; shutdown_grace_s is %g.", name, lost, math.ceil(seconds), grace)
            return False
        self._state.stopping = True
        about = f"saving iteration {self._number} (about {math.ceil(seconds)} s), then stopping"
        logger.info("%s: %s; a second signal stops at once.", name, about)
        return True
