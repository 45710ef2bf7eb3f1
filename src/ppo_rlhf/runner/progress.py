"""What a person sees of the loop: one bar on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

FEW_ITERATIONS = 20
LINE_INTERVAL_S = 2.0
SHOWN = (  # metric, text
    ("objective/scores", "reward {:.3f}"),
    ("objective/kl", "KL {:.2f}"),
    ("objective/entropy", "entropy {:.2f}"),
    ("throughput/episodes_per_s", "{:.1f} episodes/s"),
)


class Reporter(Protocol):
    """Shows the progress of the loop."""

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show that `iteration` (counted from 1) is complete, with its metrics as far as there are any."""


class LineReporter:
    """One log line an iteration when they are few; otherwise one every two seconds, and always the last."""

    def __init__(self, completed: int, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at `completed` of `total` iterations; `clock` returns seconds."""
        self._remaining = RemainingTime(completed, total, clock)
        self._total = total
        self._every_one = total - completed <= FEW_ITERATIONS
        self._clock = clock
        self._last_line_at = float("-inf")
        self._unshown: str | None = None

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log this iteration, or remember it."""
        parts = [f"Iteration {iteration}/{self._total}", *_readings(metrics)]
        left = self._remaining.after(iteration)
        if iteration < self._total:
            parts.append(f"{left} left")
        self._unshown = ", ".join(parts)
        if self._every_one or iteration >= self._total or self._clock() - self._last_line_at >= LINE_INTERVAL_S:
            self.show_last()

    def show_last(self) -> None:
        """Log the last iteration if it has not been; a run that fails shows how far it came."""
        if self._unshown is not None:
            logger.info("%s", self._unshown)
            self._unshown, self._last_line_at = None, self._clock()


class BarReporter:
    """A bar with the latest readings behind it."""

    def __init__(self, progress: Progress, completed: int, total: int) -> None:
        """Add a task to `progress` that stands at `completed` of `total` iterations."""
        self._progress = progress
        self._remaining = RemainingTime(completed, total, time.monotonic)
        self._task = progress.add_task("PPO", completed=completed, total=total, readings="")

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Move the bar."""
        readings = [*_readings(metrics), f"{self._remaining.after(iteration)} left"]
        self._progress.update(self._task, completed=iteration, readings=", ".join(readings))


class RemainingTime:
    """An estimate from the mean time of the iterations since it was made."""

    def __init__(self, completed: int, total: int, clock: Callable[[], float]) -> None:
        """Start the clock at `completed` of `total` iterations."""
        self._first, self._total, self._clock = completed, total, clock
        self._started_at = clock()

    def after(self, iteration: int) -> str:
        """Return the time left once `iteration` is complete, as h:mm:ss or m:ss."""
        per_iteration = (self._clock() - self._started_at) / max(1, iteration - self._first)
        seconds = round(per_iteration * max(0, self._total - iteration))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def reporting(completed: int, total: int) -> Iterator[Reporter]:
    """Yield the reporter that suits where the log goes: the bar shares rich's console with Kedro's log handler."""
    console = rich.get_console()
    if console.is_terminal and not console.is_jupyter:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[readings]}"),
        )
        with Progress(*columns, console=console, refresh_per_second=4) as progress:
            yield BarReporter(progress, completed, total)
        return
    reporter = LineReporter(completed, total)
    try:
        yield reporter
    finally:
        reporter.show_last()


def _readings(metrics: Mapping[str, float]) -> list[str]:
    return [text.format(metrics[name]) for name, text in SHOWN if name in metrics]
