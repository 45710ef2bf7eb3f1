"""Importing large packages, at start-up and where a function first needs one."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold Python's garbage collector back, also as a decorator; it goes on afterwards if it was on before.

    torch, transformers and MLflow make half a million objects as they are imported, and they stay. The collector
    goes through all of them time and again and finds nothing: a fifth of the time up to the first node of a run.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
