"""Code of users, which may neither end this process nor go on with its work in a process that it has forked."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending_children() -> Iterator[None]:
    """End a process that was forked within the block where it would leave the block, by an error or by a return.

    It ends as Python would, with the exit code of its `SystemExit`, or its traceback and 1. But it skips what Python
    calls at the end: that is the parent's, as are the run in MLflow, the lock and the callbacks.
    """
    parent, leave = os.getpid(), os._exit
    try:
        yield
    except BaseException as stop:
        if os.getpid() != parent:
            _end(stop, leave)
        raise
    if os.getpid() != parent:
        print("A forked process came back from the function that forked it. It ends here.", file=sys.stderr)
        _end(SystemExit(1), leave)


@contextmanager
def guarded() -> Iterator[None]:
    """Do likewise, and raise `SystemExit` in place of `os._exit`, which would end the run without a message."""
    leave, process = os._exit, os.getpid()

    def refuse(code: int) -> None:
        if os.getpid() != process:
            leave(code)  # a forked worker of theirs may end
        raise SystemExit(f"os._exit({code})")

    with ending_children():
        os._exit = refuse  # type: ignore[assignment]
        try:
            yield
        finally:
            os._exit = leave


def _end(stop: BaseException, leave: Callable[[int], None]) -> None:
    code = 1
    if isinstance(stop, SystemExit):
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
    else:
        traceback.print_exception(stop)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody reads it, or there is none
            continue
    leave(code)
