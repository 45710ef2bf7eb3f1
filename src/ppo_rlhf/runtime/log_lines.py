"""Keeps the log short: silences other libraries within a `with` block, and logs a line only once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

log = logging.getLogger(__name__)

said: set[str] = set()
"""The lines that `say_once` has logged. Each pipeline run and each PPOTrainer clears the logged lines, also if one
process has several runs."""


def say_once(line: str, level: int = logging.WARNING) -> None:
    """Log a line only once in a run, because the checks before the run and the run's nodes read the same files."""
    if line not in said:
        said.add(line)
        log.log(level, "%s", line)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch transformers' progress bars off within the block: a run has its own progress bar."""
    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()


@contextmanager
def errors_only(logger: str, least: int = logging.ERROR) -> Iterator[None]:
    """Drop a logger's records below the level `least` (default: ERROR) within the `with` block."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(least)
    try:
        yield
    finally:
        log.setLevel(before)
