"""Shows, saves and evaluates each iteration of PPO; the pipeline's runner and PPOTrainer share `RunControl`."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.names import EXPORTED
from ppo_rlhf.runtime.progress_display import Show, say
from ppo_rlhf.runtime.signals import grace
from ppo_rlhf.runtime.stop_exceptions import StopBeforeUpdate, TerminationSignal

if TYPE_CHECKING:
    from ppo_rlhf.ppo.callbacks import Callbacks
    from ppo_rlhf.ppo.checkpointer import Checkpointer
    from ppo_rlhf.ppo.progress import Progress
    from ppo_rlhf.ppo.stop_requests import Stop


EVALUATING = "in the evaluation of iteration"
UPDATE_S = "time/optimise_s"
"""The metric with the seconds of an iteration's update."""


def is_best(row: Mapping[str, Any]) -> bool:
    """Return whether an evaluation, by its row of metrics, is the best of its run so far."""
    return bool(row.get("eval/since_best_score", 0.0) > 0.0)


class RunControl(ABC):
    """Shows, saves and evaluates each iteration, calls the callbacks, and stops the run on request.

    An iteration is saved before its callbacks and its evaluation, so that an error in a callback or in the evaluation
    loses no iteration (decision 0011). All processes call the same methods of `RunControl`, and stop after the same
    iteration.
    """

    show: Show
    """Function that shows an iteration on the screen; must be set before the first iteration."""

    def __init__(
        self, progress: Progress, callbacks: Callbacks, checkpointer: Checkpointer, *, keeps_best: bool = False
    ) -> None:
        """Prepare the control of a run.

        `keeps_best` is True with `evaluation.on_exploitation=stop`: the best evaluation has a checkpoint, and an
        evaluation can end the run.
        """
        self.progress, self.callbacks, self.checkpointer = progress, callbacks, checkpointer
        self._keeps_best = keeps_best
        self.grace_s: float | None = progress.config.shutdown_grace_s  # None: without limit
        self._saving = " and saving it" if checkpointer.can_save else ""
        # In a `stoppable` block: what the block does, and the number of iterations that were complete when it began
        self._block: tuple[str, int] | None = None
        self._is_long_said = False

    @abstractmethod
    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the policy if an evaluation is due, and return the evaluation's row of metrics, else None."""

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return the exception that stops the run.

        `why` is empty if a signal asked the run to stop; else `why` is the reason to stop: the end of `max_time`.
        """
        return TerminationSignal(signum, why)

    def begin(self, *, is_resumed: bool) -> None:
        """Call `on_train_begin` of the callbacks; if the run is resumed and an evaluation is due, evaluate the policy.

        An iteration is saved before its evaluation, so the evaluation of a resumed iteration may be missing.
        """
        if self._keeps_best and self.progress.best_evaluation is None:
            self.progress.best_evaluation = 0
            self.checkpointer.save()  # the models that the run starts from
        if not self.progress.finished:
            self.callbacks.begin()
        if is_resumed:
            with self.stoppable(f"{EVALUATING} {self.progress.iteration}"):
                row = self.evaluate()
            self._heed(row)
            self.callbacks.evaluated(row)

    def after_iteration(self, metrics: Mapping[str, float]) -> None:
        """Show and save an iteration, call the callbacks, and evaluate; stop the run if it was asked to stop.

        Raises:
            TrainingError: A callback raised an exception.
            ConfigError: A callback set a flag that has no effect in PPO's loop.
            BaseException: The run was asked to stop (`interruption`); the iteration is saved.
        """
        self.show(self.progress.iteration, metrics)
        self.checkpointer.iteration_ended()
        self.callbacks.iteration_ended(metrics)
        self._stop_if_asked()
        with self.stoppable(f"{EVALUATING} {self.progress.iteration}"):
            row = self.evaluate()
        self._heed(row)
        self.callbacks.evaluated(row)
        self._stop_if_asked()

    def _heed(self, row: Mapping[str, Any] | None) -> None:
        """Save the iteration if its evaluation is the best so far; end the run if the evaluation says so (`EXPORTED`).

        The main process decides for all processes.
        """
        progress = self.progress
        if not self._keeps_best or progress.requests.restore_best:
            return
        now = row if row and row["iteration"] == progress.iteration else {}
        is_better, ends = processes.from_main((is_best(now), EXPORTED in now))
        if is_better:
            progress.best_evaluation = progress.iteration
        progress.requests.end |= ends
        progress.requests.restore_best = ends
        if ends or (is_better and not self.checkpointer.is_saved):
            self.callbacks.save()

    def iteration(self) -> AbstractContextManager[None]:
        """Return the context of the next iteration, which a first signal ends, except during the update."""
        return self.stoppable(f"before the update of iteration {self.progress.iteration + 1}")

    @contextmanager
    def stoppable(self, what: str) -> Iterator[None]:
        """Let a first signal end the block, except during an update; the last complete iteration is then saved.

        The block of one process ends at once, by the signal handler. The blocks of several processes end at the next
        `RunRequests.meet`. `what` says where the run stops.
        """
        self._block = what, self.progress.iteration
        try:
            yield
        except StopBeforeUpdate as stop:
            self.checkpointer.save_if_new()
            raise self.interruption(stop.signum, "") from stop
        finally:
            self._block = None

    def ask(
        self, signum: int, asked_again: Sequence[str] = (), by_evaluation: Sequence[str] = ()
    ) -> tuple[str, StopBeforeUpdate | None]:
        """Request the end of the run; return the line to log, and the exception that stops the work.

        The exception is None if the work goes on until the run can be saved. The signal handler calls `ask`.
        `asked_again` names what is asked anew when the iteration is repeated, `by_evaluation` when its evaluation is.
        """
        progress, block = self.progress, self._block
        progress.requests.signum = signum
        name, second = signal.Signals(signum).name, "a second signal stops at once."
        if block is None or block[1] != progress.iteration or progress.updating:
            what = f"finishing iteration {progress.iteration}{self._saving}"
            if progress.updating:
                limit = grace(signum, self.grace_s)
                what = f"finishing iteration {progress.iteration + 1}{self._saving} {self._in_about(limit)}"
            return f"{name}: {what}, then stopping; {second}", None
        is_alone = processes.process_count() == 1
        where, limit = "", grace(signum, self.grace_s)
        kept = f"iteration {progress.iteration} is saved" if progress.iteration else "no iteration is complete"
        kept = kept if self.checkpointer.can_save else "nothing is saved, as there is no folder"
        if not is_alone:
            where = ", where the processes next meet"
            kept += f" if they meet within {limit:.0f} s" if limit is not None and progress.iteration else ""
        names = by_evaluation if block[0].startswith(EVALUATING) else asked_again
        again = f"; a resumed run asks {' and '.join(names)} again" if names else ""
        line = f"{name}: stopping {block[0]}{where}; {kept}{again}; {second}"
        return line, StopBeforeUpdate(signum) if is_alone else None

    def say_if_long(self, metrics: Mapping[str, float]) -> None:
        """Say once that an update, with its checkpoint, takes longer than `ppo.shutdown_grace_s`."""
        grace_s = self.progress.config.shutdown_grace_s
        if self._is_long_said or not 0.0 < grace_s < metrics.get(UPDATE_S, 0.0):
            return
        self._is_long_said = True
        say(
            f"An update takes about {metrics[UPDATE_S]:.0f} s, ppo.shutdown_grace_s={grace_s:g}: a run that gets "
            "SIGTERM during an update is not saved, and resumes from its last checkpoint. To save it, raise "
            "ppo.shutdown_grace_s, and the time that your platform waits."
        )

    def _stop_if_asked(self) -> None:
        """Save the iteration and raise `interruption` if a signal or the end of `max_time` asked a process to stop."""
        stop: Stop | None = self.progress.share_requests()
        if stop is None:
            return
        signum, why = stop
        if why:
            say(f"{why} are over: iteration {self.progress.iteration} is saved, and the run stops.")
        self.checkpointer.save_if_new()
        raise self.interruption(signum, why)

    def _in_about(self, limit: float | None) -> str:
        """Return in how many seconds the update that runs will be saved, and whether a limit of seconds ends before."""
        left = self.checkpointer.update_left()
        if left is None:
            return "(the first update, whose time is not known)"
        text = f"in about {left:.0f} s"
        if limit is None or left <= limit:
            return text
        return (
            f"{text} (shutdown_grace_s={limit:g} ends before: then the run stops, and resumes from its last checkpoint)"
        )
