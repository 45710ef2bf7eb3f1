"""Keeping libraries quiet for a while: a run has one progress bar and one voice of its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch transformers' progress bars off for a while: a run has one bar of its own."""
    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()


@contextmanager
def critical_only(logger: str) -> Iterator[None]:
    """Let a logger through only from CRITICAL on."""
    with _only(logger, logging.CRITICAL):
        yield


@contextmanager
def errors_only(logger: str) -> Iterator[None]:
    """Let a logger through only from ERROR on."""
    with _only(logger, logging.ERROR):
        yield


@contextmanager
def _only(logger: str, least: int) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(least)
    try:
        yield
    finally:
        log.setLevel(level)
