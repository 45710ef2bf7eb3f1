"""Shows, saves and evaluates each iteration of PPO; the pipeline's runner and PPOTrainer share `Epilogue`."""

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

    An iteration is saved before its callbacks and its evaluation, so that an error in a callback or in the evaluation
    loses no iteration (decision 0011). All processes call the same methods of `Epilogue`, and stop after the same
    iteration.
    """

    show: Show
    """Function that shows an iteration on the screen; must be set before the first iteration."""

    def __init__(self, state: TrainingState, callbacks: Callbacks, save: Callable[[], None]) -> None:
        """Prepare the epilogue of a run; `save` saves the current iteration."""
        self.state, self.callbacks, self.save = state, callbacks, save

    @abstractmethod
    def save_if_due(self) -> bool:
        """Save the iteration if a checkpoint is due, and return whether it was saved."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the policy if an evaluation is due, and return the evaluation's row of metrics, else None."""

    @abstractmethod
    def asked_by(self) -> int | None:
        """Return the number of the signal that asked this process to stop, or None."""

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return the exception that stops the run.

        `why` is empty if a signal asked the run to stop; else `why` is the reason to stop: the end of `max_time`.
        """
        return TerminationSignal(signum, why)

    def begin(self, *, is_resumed: bool) -> None:
        """Call `on_train_begin` of the callbacks; if the run is resumed and an evaluation is due, evaluate the policy.

        An iteration is saved before its evaluation, so the evaluation of a resumed iteration may be missing.
        """
        if not self.state.finished:
            self.callbacks.begin()
        if is_resumed:
            self.callbacks.evaluated(self.evaluate())

    def after_iteration(self, metrics: Mapping[str, float]) -> None:
        """Show and save an iteration, call the callbacks, and evaluate; stop the run if it was asked to stop.

        Raises:
            TrainingError: A callback raised an exception.
            ConfigError: A callback set a flag that has no effect in PPO's loop.
            BaseException: The run was asked to stop (`interruption`); the iteration is saved.
        """
        self.show(self.state.iteration, metrics)
        self.callbacks.iteration_ended(metrics, is_saved=self.save_if_due())
        self._stop_if_asked()
        self.callbacks.evaluated(self.evaluate())
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """Save the iteration and raise `interruption` if a signal or the end of `max_time` asked a process to stop."""
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
        # Save the current iteration if its checkpoint was not due
        if not processes.from_main(self.callbacks.is_saved):
            self.save()
        raise self.interruption(signum, why)
