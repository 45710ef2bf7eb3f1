"""The progress of a run, as a user sees it: one bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from ppo_rlhf import processes

FEW_ITERATIONS, LINE_INTERVAL_S = 20, 2.0
SHOWN = {
    "objective/scores": "reward {:z.3f}",
    "objective/kl": "KL {:z.2f}",
    "objective/entropy": "entropy {:z.2f}",
    "throughput/episodes_per_s": "{:.1f} episodes/s",
    **{f"{stage}/loss": "loss {:.3f}" for stage in ("sft", "reward_model", "critic")},
    **{f"{stage}/learning_rate": "learning rate {:.2g}" for stage in ("sft", "reward_model")},
    "critic/explained_variance": "explained variance {:z.2f}",
    "sft/eval_loss": "held-out loss {:.3f}",
    "reward_model/eval_accuracy": "accuracy {:.1%}",
}

listeners: list[Callable[[Mapping[str, float], int], None]] = []
"""Called with the metrics of a stage that is one node, and their step, while it runs."""

logger = logging.getLogger("ppo_rlhf.runner")


@contextmanager
def reporting(
    done: int, total: int, title: str = "PPO", step: str = "Iteration"
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield a function that shows that an iteration (counted from 1) is complete, with its metrics.

    On a terminal that is one bar, on rich's console as Kedro's log. Elsewhere it is a log line for each of few
    iterations; for each of many if the last line is two seconds old, and for the last one. Of the `total` iterations
    `done` are complete already; `step` stands for `Iteration` in a log line.
    """
    started_at = time.monotonic()
    line_at = float("-inf")

    def readings(iteration: int, metrics: Mapping[str, float]) -> list[str]:
        seconds = (time.monotonic() - started_at) / max(1, iteration - done) * (total - iteration)
        left = [f"{timedelta(seconds=round(seconds))} left"] if iteration < total else []
        return [*(text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics), *left]

    def log(iteration: int, metrics: Mapping[str, float]) -> None:
        nonlocal line_at
        if total - done <= FEW_ITERATIONS or iteration >= total or time.monotonic() - line_at >= LINE_INTERVAL_S:
            line_at = time.monotonic()
            say("%s", ", ".join([f"{step} {iteration}/{total}", *readings(iteration, metrics)]))

    console = rich.get_console()
    if not console.is_terminal or console.is_jupyter or not processes.is_main_process():
        yield log
        return
    columns = (title, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[readings]}")
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(title, completed=done, total=total, readings="")
        yield lambda iteration, metrics: progress.update(
            task, completed=iteration, readings=", ".join(readings(iteration, metrics))
        )


@contextmanager
def watching(title: str, total: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield a function that shows the metrics of a stage's optimiser step, and tells the listeners."""
    with reporting(0, total, title, f"{title} step") as show:

        def report(step: int, metrics: Mapping[str, float]) -> None:
            show(step, metrics)
            for listener in listeners:
                listener(metrics, step)

        yield report


@contextmanager
def silenced(names: Iterable[str]) -> Iterator[None]:
    """Let these loggers through only from WARNING on, unless they were set to DEBUG."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for quiet, level in levels.items():
        if quiet.getEffectiveLevel() > logging.DEBUG:
            quiet.setLevel(max(logging.WARNING, level))
    try:
        yield
    finally:
        for quiet, level in levels.items():
            quiet.setLevel(level)


def say(text: str, *arguments: object) -> None:
    """Log a line, only in the main process."""
    if processes.is_main_process():
        logger.info(text, *arguments)
