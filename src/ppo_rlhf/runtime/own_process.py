"""Guards around users' code, whose forked processes may not continue the run, and may keep this process alive."""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""Python exits within `PATIENCE_S` seconds unless a thread or a child process keeps Python alive."""


@contextmanager
def ending_children() -> Iterator[None]:
    """End every process that is forked within the block as soon as the forked process would leave the block.

    A forked process leaves the block by an error or by a return. The forked process ends with the exit code of its
    `SystemExit`, else with a traceback and exit code 1. The forked process skips Python's exit handlers, which belong
    to the parent process like the MLflow run, the lock and the callbacks.
    """
    parent = os.getpid()
    try:
        yield
    except BaseException as stop:
        if os.getpid() != parent:
            _end(stop)
        raise
    if os.getpid() != parent:
        print(
            "A forked process returned from the function that forked it. The forked process ends here.", file=sys.stderr
        )
        _end(SystemExit(1))


def name_what_keeps_it(seconds: float = PATIENCE_S) -> None:
    """Print, if Python has not exited `seconds` after this call, which threads and child processes keep it alive.

    Call `name_what_keeps_it` when the work of the command is done.
    """

    def say() -> None:
        # Print nothing while the main thread still runs, as in a notebook or a program that has further work to do
        if threading.main_thread().is_alive():
            return
        threads = [thread.name for thread in threading.enumerate() if thread.is_alive() and not thread.daemon]
        names = ", ".join([*threads, *(child.name for child in multiprocessing.active_children())])
        if names:
            line = (
                "The command has ended, but this process waits for threads or processes that its code started: "
                f"{names}. Ctrl-C ends the process."
            )
            print(line, file=sys.stderr)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()


def _end(stop: BaseException) -> None:
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
        # Flushing fails if the standard stream is closed, missing or a pipe without a reader
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)
