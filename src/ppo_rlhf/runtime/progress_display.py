"""The progress display of a run: one bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ppo_rlhf.runtime.processes import is_main_process

FEW_ITERATIONS, LINE_INTERVAL_S = 20, 2.0
SILENCE_S = 30.0
"""Seconds without a line after which a step, or a pass of rows, gets a line though it has no metrics."""
BAR_WIDTH = 10  # columns of a terminal
SHOWN = {
    "objective/scores": "score {:z.3f}",  # the mean score before the KL penalty is subtracted
    "objective/kl": "KL {:z.2f}",
    "objective/entropy": "entropy {:z.2f}",
    "response/length": "length {:.1f}",
    "throughput/episodes_per_s": "{:.3g} episodes/s",
    **{f"{stage}/loss": "loss {:.3f}" for stage in ("sft", "reward_model", "critic")},
    **{f"{stage}/learning_rate": "learning rate {:.2g}" for stage in ("sft", "reward_model")},
    "critic/explained_variance": "explained variance {:z.2f}",
    "sft/eval_loss": "held-out loss {:.3f}",
    "reward_model/eval_accuracy": "accuracy {:.1%}",
}
"""The metrics of the progress display, the most important first; docs/metrics.md has their units."""

Show = Callable[[int, Mapping[str, float]], None]
"""A function that shows that an iteration or step (counted from 1) is complete; the second argument has the metrics."""

listeners: list[Callable[[Mapping[str, float], int], None]] = []
"""Functions called with (metrics, step) after each step of a stage that runs as one node, such as SFT."""

logger = logging.getLogger(__name__)


def say(line: str) -> None:
    """Log a line in the main process only; print it if logging is not configured, as transformers' Trainer does."""
    if not is_main_process():
        return
    if logger.hasHandlers():
        logger.info("%s", line)
    else:
        print(line)  # a bar takes what is printed and puts it above itself


def readings(metrics: Mapping[str, float]) -> list[str]:
    """Return the texts of the metrics in `SHOWN`."""
    return [text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics]


@dataclass
class Lines:
    """Log lines for completed iterations.

    Up to `FEW_ITERATIONS` iterations get one line each. In longer runs the first and the last iteration get a line
    each, and the iterations between get at most one line in `interval_s` seconds. An iteration without metrics, such as
    a step between two logged losses, gets a line only if there was none for `SILENCE_S` seconds.
    """

    done: int  # number of iterations that were complete when training started
    total: int
    interval_s: float = LINE_INTERVAL_S
    step: str = "Iteration"
    started_at: float = field(default_factory=lambda: time.monotonic())
    line_at: float = -math.inf

    def show(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log that an iteration is complete, if a line is due for this iteration."""
        now = time.monotonic()
        if metrics:
            has_few = self.total - self.done <= FEW_ITERATIONS
            is_due = has_few or iteration >= self.total or now - self.line_at >= self.interval_s
        else:
            is_due = iteration < self.total and now - max(self.started_at, self.line_at) >= SILENCE_S
        if is_due:
            self.line_at = now
            say(", ".join([f"{self.step} {iteration}/{self.total}", *readings(metrics), *self.time_left(iteration)]))

    def time_left(self, iteration: int) -> list[str]:
        """Return [text with the training time left at the pace so far]; an empty list after the last iteration."""
        if iteration >= self.total:
            return []
        seconds = (time.monotonic() - self.started_at) / max(1, iteration - self.done) * (self.total - iteration)
        return [f"{timedelta(seconds=round(seconds))} left"]


@contextmanager
def reporting(done: int, total: int, title: str = "PPO", step: str = "Iteration") -> Iterator[Show]:
    """Yield a function that shows a completed iteration: in a bar on a terminal, else by `Lines`.

    `done` of the `total` iterations are complete already. `step` is the first word of a log line.
    """
    lines = Lines(done, total, step=step)
    with progress_bar(lines, title) as show:
        yield lines.show if show is None else show


@contextmanager
def progress_bar(lines: Lines, title: str = "PPO") -> Iterator[Show | None]:
    """Yield a function that shows a completed iteration in a bar, or None if there is no terminal to show it on.

    The bar is on the rich console of Kedro's log; what the process prints stands above the bar. The bar's line has the
    time since the bar began, the iterations, the time left, and as many metrics as the terminal is wide enough for.
    """
    console = rich.get_console()
    if not console.is_terminal or console.is_jupyter or not is_main_process():
        yield None
        return
    # Only the last column becomes narrower where the line would be too long
    last = TextColumn("{task.fields[texts]}", table_column=Column(ratio=1, no_wrap=True))
    columns = (title, TimeElapsedColumn(), BarColumn(BAR_WIDTH), MofNCompleteColumn(), last)
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as progress:
        task = progress.add_task(title, completed=lines.done, total=lines.total, texts="")

        shown: list[str] = []

        def show(iteration: int, metrics: Mapping[str, float]) -> None:
            shown[:] = readings(metrics) or shown  # without metrics the last ones stay
            texts = [*lines.time_left(iteration), *shown]
            room = console.width - BAR_WIDTH - len(f"{title} 0:00:00  {lines.total}/{lines.total} ")
            while texts and len(", ".join(texts)) > room:
                texts.pop()
            progress.update(task, completed=iteration, texts=", ".join(texts))

        yield show


@contextmanager
def watching(title: str, total: int) -> Iterator[Show]:
    """Yield a function that shows a stage's optimiser step, and calls the `listeners` if the step has metrics."""
    with reporting(0, total, title, f"{title} step") as show:

        def report(step: int, metrics: Mapping[str, float]) -> None:
            show(step, metrics)
            for listener in listeners if metrics else ():
                listener(metrics, step)

        yield report


@contextmanager
def silenced(names: Iterable[str]) -> Iterator[None]:
    """Raise the level of the given loggers to WARNING within the block, except loggers at level DEBUG."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for named_logger, level in levels.items():
        if named_logger.getEffectiveLevel() > logging.DEBUG:
            named_logger.setLevel(max(logging.WARNING, level))
    try:
        yield
    finally:
        for named_logger, level in levels.items():
            named_logger.setLevel(level)
