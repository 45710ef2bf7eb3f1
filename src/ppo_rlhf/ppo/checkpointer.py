"""`Checkpointer`: the one place that records an iteration, decides whether to save it, and has it saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.runtime.metrics_file import metrics_of
from ppo_rlhf.runtime.processes import from_main, is_main_process

SAVED_FIRST_S = 60.0
"""The first iteration of a run is saved if it took longer than `SAVED_FIRST_S` seconds."""
SAVING_SHARE = 0.05
"""Greatest share of the time that checkpoints by time take."""


class Checkpointer:
    """Saves a run after each `ppo.save_interval` iterations, by time, at the run's end, and whenever it is asked.

    Every process makes the same calls.

    Attributes:
        save_seconds: How long the last checkpoint took.
    """

    def __init__(self, progress: Progress, folder: Path | None, write: Callable[[], None] | None) -> None:
        """Prepare for a run that begins, or goes on, at `progress`.

        `folder` gets metrics.jsonl, unless it is None. `write` writes a checkpoint of the whole state; None: the run
        saves none.
        """
        self._progress, self._folder, self._write = progress, folder, write
        self._saved_iteration = progress.iteration  # a run begins at a checkpoint, or has nothing to save yet
        self._saved_at, self.save_seconds = time.perf_counter(), 0.0
        self._record()

    @property
    def can_save(self) -> bool:
        """Whether the run saves checkpoints."""
        return self._write is not None

    @property
    def is_saved(self) -> bool:
        """Whether the last complete iteration has a checkpoint."""
        return self._saved_iteration == self._progress.iteration

    def iteration_ended(self) -> None:
        """Record the iteration in metrics.jsonl, share what the processes were asked, and save if that is due."""
        progress, config = self._progress, self._progress.config
        self._record()
        progress.share_requests()
        by_time = from_main(self._is_due_by_time())
        by_number = progress.iteration % config.save_interval == 0
        if by_number or by_time or progress.finished or progress.requests.stop is not None:
            self.save()

    def save_if_new(self) -> None:
        """Save the last complete iteration, unless it has a checkpoint."""
        if not self.is_saved:
            self.save()

    def save(self) -> None:
        """Save the last complete iteration: a signal, a callback, an error, or the best evaluation asks for it."""
        if self._write is None:
            return
        entered = time.perf_counter()
        self._write()
        self._saved_at = time.perf_counter()
        self.save_seconds = self._saved_at - entered
        self._saved_iteration = self._progress.iteration

    def update_left(self) -> float | None:
        """Return about how many seconds the rest of this update and a checkpoint take; None in the first update."""
        left = self._progress.update_left()
        return None if left is None else left + self.save_seconds

    def _record(self) -> None:
        """Write the iterations to metrics.jsonl that it lacks."""
        if self._folder is not None and is_main_process():
            metrics_of(self._folder).catch_up(self._progress.history)

    def _is_due_by_time(self) -> bool:
        minutes = self._progress.config.save_interval_minutes
        if minutes is None:
            return False
        now = time.perf_counter()
        is_long_first = self._progress.iteration == 1 and now - self._progress.clock.started > SAVED_FIRST_S
        wait = max(60.0 * minutes, (1.0 / SAVING_SHARE - 1.0) * self.save_seconds)
        return is_long_first or now - self._saved_at >= wait
