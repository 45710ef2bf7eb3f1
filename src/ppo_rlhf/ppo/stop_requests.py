"""The one place that says what can ask a run to stop or to evaluate, and who asks."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ppo_rlhf.runtime.processes import from_all
from ppo_rlhf.runtime.signals import time_is_over
from ppo_rlhf.runtime.stop_exceptions import StopBeforeUpdate

Stop = tuple[int, str]
"""A request to stop: the signal, and the reason if no signal came: the end of `ppo.max_time`."""


@dataclass
class RunRequests:
    """The open requests of a run.

    `Progress.finished`, `Checkpointer` and `evaluation.during_training.is_due` say what follows from them, together
    with the settings `total_episodes`, `save_interval` and `eval_interval`.
    """

    # The signal that asked this process to stop. The signal handler sets it (`RunControl.ask`)
    signum: int | None = None
    # What asked any process to stop (`share`): the run saves the current iteration and stops; it can be resumed
    stop: Stop | None = None
    # True if a callback set `should_training_stop`: no further iteration runs, also not in a resumed run. Checkpoints
    # store it
    end: bool = False
    # True if an evaluation found that the policy exploits its reward, with `evaluation.on_exploitation=stop`: `end` is
    # True, too, and the run exports the policy of its best evaluation. Checkpoints store it
    restore_best: bool = False
    evaluate: bool = False  # True if a callback set `should_evaluate`: the policy is evaluated in this iteration

    def share(self, max_time: float | None = None) -> Stop | None:
        """Return what asked any process to stop, or None; every process calls `share`.

        A signal may have reached only one process. `max_time` is `ppo.max_time`, in hours.
        """
        why = time_is_over(max_time) if self.signum is None else ""
        signum = signal.SIGTERM if why else self.signum
        answers = from_all(None if signum is None else (int(signum), why))
        self.stop = next((answer for answer in answers if answer is not None), None)
        return self.stop

    def meet(self) -> None:
        """Raise `StopBeforeUpdate` if any process was asked to stop; all processes call `meet`, outside of updates."""
        if (stop := self.share()) is not None:
            raise StopBeforeUpdate(stop[0])
