"""What follows each iteration of PPO, in one order for the pipeline's runner and for PPOTrainer."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.progress import Show, say
from ppo_rlhf.runtime.signals import TerminationSignal, time_is_over

if TYPE_CHECKING:
    from ppo_rlhf.ppo.callbacks import Callbacks
    from ppo_rlhf.ppo.state import TrainingState


class Epilogue(ABC):
    """Shows, saves and evaluates iterations, tells the callbacks of them, and stops a run that was asked to stop.

    An iteration is saved before callbacks and evaluation, so that an error in these loses none (decision 0011). All
    processes call the same methods, and stop after the same iteration.
    """

    show: Show
    """Shows an iteration on the screen; to be set before the first one."""

    def __init__(self, state: TrainingState, callbacks: Callbacks, save: Callable[[], None]) -> None:
        """Take the state of the iteration at hand, and what saves it."""
        self.state, self.callbacks, self.save = state, callbacks, save

    @abstractmethod
    def save_if_due(self) -> bool:
        """Save the iteration if its checkpoint is due, and return whether it is saved."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the iteration if that is due, and return the row of the evaluation for the callbacks."""

    @abstractmethod
    def asked_by(self) -> int | None:
        """Return the signal that asked this process to stop; None: there was none."""

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return what to raise when the run stops; `why` says what else than a signal stopped it."""
        return TerminationSignal(signum, why)

    def begin(self, *, is_resumed: bool) -> None:
        """Begin before the first iteration; a resumed one was saved before its evaluation, which is made up for."""
        if not self.state.finished:
            self.callbacks.begin()
        if is_resumed:
            self.callbacks.evaluated(self.evaluate())

    def after_iteration(self, metrics: Mapping[str, float]) -> None:
        """Do what follows an iteration.

        Raises:
            TrainingError, ConfigError: As `Callbacks.iteration_ended` and `Callbacks.evaluated`.
            BaseException: The `interruption` of a run that was asked to stop; the iteration is saved.
        """
        self.show(self.state.iteration, metrics)
        self.callbacks.iteration_ended(metrics, is_saved=self.save_if_due())
        self._stop_if_asked()
        self.callbacks.evaluated(self.evaluate())
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """Save the iteration and raise if a signal, or the end of `max_time`, asked any process to stop."""
        signum = self.asked_by()
        over = time_is_over(self.state.config.max_time) if signum is None and not self.state.finished else ""
        if over:
            signum = signal.SIGTERM
        asked = [(own, why) for own, why in processes.from_all((signum, over)) if own is not None]
        if not asked:
            return
        signum, why = asked[0]
        if why:
            say(f"{why} are over: iteration {self.state.iteration} is saved, and the run stops.")
        self.state.stopping = True
        if not processes.from_main(self.callbacks.is_saved):  # no checkpoint was due before the request
            self.save()
        raise self.interruption(signum, why)
