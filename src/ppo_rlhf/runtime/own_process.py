"""Guards around users' code, which may not end this process, and whose forked processes may not continue the run."""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""Python exits within `PATIENCE_S` seconds unless a thread or a child process keeps Python alive."""
_guarded: list[int] = []  # for each open block of `guarded`, in any thread, the id of the process that opened the block
_guarding = threading.Lock()
_leave = os._exit


@contextmanager
def ending_children() -> Iterator[None]:
    """End every process that is forked within the block as soon as the forked process would leave the block.

    A forked process leaves the block by an error or by a return. The forked process ends with the exit code of its
    `SystemExit`, else with a traceback and exit code 1. The forked process skips Python's exit handlers, which belong
    to the parent process like the MLflow run, the lock and the callbacks.
    """
    parent, leave = os.getpid(), os._exit
    try:
        yield
    except BaseException as stop:
        if os.getpid() != parent:
            _end(stop, leave)
        raise
    if os.getpid() != parent:
        print(
            "A forked process returned from the function that forked it. The forked process ends here.", file=sys.stderr
        )
        _end(SystemExit(1), leave)


@contextmanager
def guarded() -> Iterator[None]:
    """End forked processes as `ending_children` does, and make `os._exit` raise `SystemExit` within the block.

    The real `os._exit` would end the run without a message. Blocks of several threads may overlap: `os._exit` is
    restored at the end of the last block.
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
            # Take the lock only in the original process: in a forked process a lock that another thread held is never
            # released
            if os.getpid() == process:
                with _guarding:
                    _guarded.remove(process)
                    if not _guarded:
                        os._exit = _leave


def _refuse(code: int) -> None:
    if os.getpid() not in _guarded:
        _leave(code)  # a worker process that the user's code has forked may call os._exit
    raise SystemExit(f"os._exit({code})")


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
        # Flushing fails if the standard stream is closed, missing or a pipe without a reader
        except (OSError, ValueError, AttributeError):
            continue
    leave(code)
