"""Code of users, which may neither end this process nor go on with its work in a process that it has forked."""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""Python ends within this time if nothing keeps it."""
_guarded: list[int] = []  # the process of each block of `guarded` that is open, whichever thread opened it
_guarding = threading.Lock()
_leave = os._exit


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
    """Do likewise, and raise `SystemExit` in place of `os._exit`, which would end the run without a message.

    Blocks of several threads may overlap: `os._exit` is back at the end of the last one.
    """
    global _leave
    process = os.getpid()
    with ending_children():
        with _guarding:
            if os._exit is not _refuse:
                _leave, os._exit = os._exit, _refuse  # type: ignore[assignment]
            _guarded.append(process)
        try:
            yield
        finally:
            if os.getpid() == process:  # in a forked one another thread's lock would never be freed
                with _guarding:
                    _guarded.remove(process)
                    if not _guarded:
                        os._exit = _leave


def _refuse(code: int) -> None:
    if os.getpid() not in _guarded:
        _leave(code)  # a forked worker of theirs may end
    raise SystemExit(f"os._exit({code})")


def name_what_keeps_it(seconds: float = PATIENCE_S) -> None:
    """Call it as the work is done: if Python ends but does not come to its end, say which threads it waits for."""

    def say() -> None:
        if threading.main_thread().is_alive():  # a notebook, or a program that has other work
            return
        threads = [thread.name for thread in threading.enumerate() if thread.is_alive() and not thread.daemon]
        names = ", ".join([*threads, *(child.name for child in multiprocessing.active_children())])
        if names:
            line = f"The command has ended, but this process waits for what its code started: {names}. Ctrl-C ends it."
            print(line, file=sys.stderr)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()


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
