"""What PPOTrainer.train does after each iteration: a line, a checkpoint, callbacks, an evaluation, a limit of time."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from ppo_rlhf.checkpoints.records import prune_run, write_completions
from ppo_rlhf.checkpoints.store import CheckpointRequest
from ppo_rlhf.evaluation.during_training import is_due
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.samples import completion_rows
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import from_all, is_main_process
from ppo_rlhf.signals import RunInterruptedError, time_is_over
from ppo_rlhf.trainer.evaluation import HeldOut
from ppo_rlhf.trainer.progress import in_one_line, say, verdict_line


class Bookkeeper:
    """Keeps the records of one call of `train`; the pipeline's runner does the same in the same order."""

    def __init__(
        self,
        state: TrainingState,
        held_out: HeldOut | None,
        callbacks: Callbacks,
        directory: Path | None,
        save: Callable[[Path], Path],
    ) -> None:
        """Take the run's state, what evaluates it, the folder of its checkpoints, and what saves one."""
        self._state, self._held_out, self._callbacks = state, held_out, callbacks
        self._directory, self._save_to = directory, save

    def begin(self, bar: tqdm, *, is_resumed: bool) -> None:
        """Before the first iteration: a checkpoint was saved before its evaluation, which is made up for."""
        self._bar = bar
        if is_resumed and self._state.iteration:
            self._evaluate_if_due()
        if not self._state.finished:
            self._callbacks.begin()
            self._callbacks.settle(self._save)

    def before_update(self, experience: Experience) -> None:
        """Keep the completions of a sampled iteration."""
        is_sampled = self._state.config.samples(experience.rollouts.iteration)
        if is_sampled and self._directory is not None and is_main_process():
            write_completions(self._directory, completion_rows(experience))

    def after_iteration(self, metrics: dict[str, float]) -> None:
        """Record one iteration."""
        state = self._state
        say(in_one_line(state, metrics))
        self._bar.update()
        is_saved = self._directory is not None and CheckpointRequest(state).due
        if is_saved:
            self._save()
        self._callbacks.iteration_ended(metrics, is_saved=is_saved)
        self._callbacks.settle(self._save)
        self._evaluate_if_due()
        if state.config.max_time is None or state.finished:
            return
        if why := next(filter(None, from_all(time_is_over(state.config.max_time))), ""):
            state.stopping = True
            if not is_saved:
                self._save()
            say(f"{why} are over: iteration {state.iteration} is saved in {self._directory}")
            raise RunInterruptedError(signal.SIGTERM, why)

    def _evaluate_if_due(self) -> None:
        if self._held_out is not None and is_due(self._state):
            say(verdict_line(self._held_out.evaluate(self._state, self._directory).metrics))
            self._callbacks.evaluated(self._held_out.rows[-1])
            self._callbacks.settle(self._save)

    def _save(self) -> None:
        if self._directory is not None:
            self._save_to(self._directory)
            if is_main_process():
                prune_run(self._directory, self._state.config, self._state.iteration)
