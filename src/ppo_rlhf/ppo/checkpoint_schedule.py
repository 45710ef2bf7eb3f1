"""Says when a checkpoint is due: by the number of iterations, by time, at the run's end, or because a run was asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ppo_rlhf.config import PPOConfig

SAVED_FIRST_S = 60.0
"""The first iteration of a run is saved if it took longer than `SAVED_FIRST_S` seconds."""
SAVING_SHARE = 0.05
"""Greatest share of the time that checkpoints by time take."""


class CheckpointSchedule:
    """Knows when the last checkpoint was complete, and how long it took."""

    def __init__(self) -> None:
        self.saved_at = time.perf_counter()  # before the first checkpoint, when the run began
        self.save_seconds = 0.0  # how long the last checkpoint took

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Store when the `with` block, which writes a checkpoint, ended, and how many seconds it took."""
        entered = time.perf_counter()
        yield
        self.saved_at = time.perf_counter()
        self.save_seconds = self.saved_at - entered

    def is_due(self, config: PPOConfig, iteration: int, *, is_asked: bool) -> bool:
        """Return whether to save after this iteration: every `ppo.save_interval` iterations, or if it is asked for."""
        return is_asked or iteration % config.save_interval == 0

    def is_due_by_time(self, minutes: float | None, iteration: int, began: float) -> bool:
        """Return whether time asks to save an iteration that began at `began` and ends now.

        `minutes` is `ppo.save_interval_minutes`.
        """
        if minutes is None:
            return False
        now = time.perf_counter()
        is_long_first = iteration == 1 and now - began > SAVED_FIRST_S
        wait = max(60.0 * minutes, (1.0 / SAVING_SHARE - 1.0) * self.save_seconds)
        return is_long_first or now - self.saved_at >= wait
