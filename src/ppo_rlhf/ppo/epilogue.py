"""The steps after each iteration of PPO: show, save, callbacks, evaluation, stop. Runner and PPOTrainer share them."""

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
    """Shows, saves and evaluates each iteration, calls the callbacks, and stops the run on request.

    An iteration is saved before callbacks and evaluation, so that an error in them loses no iteration (decision 0011).
    All processes call the same methods, and stop after the same iteration.
    """

    show: Show
    """Shows an iteration on the screen; must be set before the first iteration."""

    def __init__(self, state: TrainingState, callbacks: Callbacks, save: Callable[[], None]) -> None:
        """Prepare the epilogue of a run; `save` saves the current iteration."""
        self.state, self.callbacks, self.save = state, callbacks, save

    @abstractmethod
    def save_if_due(self) -> bool:
        """Save the iteration if a checkpoint is due, and return whether it was saved."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the policy if an evaluation is due, and return its row of metrics for the callbacks, else None."""

    @abstractmethod
    def asked_by(self) -> int | None:
        """Return the number of the signal that asked this process to stop, or None."""

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return the exception to raise when the run stops; `why` is the reason if it was not a signal, else empty."""
        return TerminationSignal(signum, why)

    def begin(self, *, is_resumed: bool) -> None:
        """Call the callbacks before the first iteration; evaluate a resumed iteration if its evaluation is due.

        An iteration is saved before its evaluation, so the evaluation of a resumed iteration may be missing.
        """
        if not self.state.finished:
            self.callbacks.begin()
        if is_resumed:
            self.callbacks.evaluated(self.evaluate())

    def after_iteration(self, metrics: Mapping[str, float]) -> None:
        """Show and save an iteration, call the callbacks, and evaluate; stop the run if it was asked to stop.

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
        requests = [(number, why) for number, why in processes.from_all((signum, over)) if number is not None]
        if not requests:
            return
        signum, why = requests[0]
        if why:
            say(f"{why} are over: iteration {self.state.iteration} is saved, and the run stops.")
        self.state.stopping = True
        # The last iteration's checkpoint was not due, and none was saved
        if not processes.from_main(self.callbacks.is_saved):
            self.save()
        raise self.interruption(signum, why)
