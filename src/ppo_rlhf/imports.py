"""Importing large packages, at start-up and where a function first needs one."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold Python's garbage collector back, also as a decorator; it goes on afterwards if it was on before.

    torch, transformers and MLflow make half a million objects as they are imported, and they stay. The collector
    goes through all of them time and again and finds nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def not_installed(package: str) -> Iterator[None]:
    """Within the block a package that nobody has imported yet cannot be imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # Python's own way to say so
    try:
        yield
    finally:
        sys.modules.pop(package, None)
