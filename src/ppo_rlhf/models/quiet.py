"""What the log shows: blocks in which other libraries are quiet, and lines that are said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

log = logging.getLogger(__name__)

said: set[str] = set()
"""What was said once; a pipeline's run and a PPOTrainer begin with nothing, also in a notebook that has several."""


def say_once(line: str) -> None:
    """Log a warning the first time in a run: the checks before it and its nodes read the same files."""
    if line not in said:
        said.add(line)
        log.warning("%s", line)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch transformers' progress bars off within the block: a run has one of its own."""
    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()


@contextmanager
def errors_only(logger: str, least: int = logging.ERROR) -> Iterator[None]:
    """Let only errors of a logger, or records of the level `least`, through within the block."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(least)
    try:
        yield
    finally:
        log.setLevel(before)
