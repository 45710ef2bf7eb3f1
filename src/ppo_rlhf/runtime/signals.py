"""SIGTERM, SIGINT and SIGHUP as exceptions, so that a run that is stopped closes its files and its MLflow run.

A node's code may contain `except Exception`, so the exception that interrupts it is a BaseException. Kedro's session
tells its hooks only of Exceptions, so LoopRunner raises an error in its place, and in place of any other BaseException.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, time
from types import FrameType

import psutil

from ppo_rlhf.core.errors import PPORLHFError, TrainingError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_REQUEST_S = 0.3
"""A signal this soon after the first one repeats it: `timeout` and launchers signal a process and then its group."""


class TerminationSignal(BaseException):
    """A signal, or a limit of time, asked this process to stop; raised in the main thread."""

    def __init__(self, signum: int, why: str = "") -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.why = signum, why


class RunInterruptedError(PPORLHFError, RuntimeError):
    """A run was stopped by a signal, or as its time was over."""

    def __init__(self, signum: int, why: str = "") -> None:
        """Take the signal; `why` says what else stopped the run, in its place."""
        read = ": nobody reads its output any more" if signum == signal.SIGPIPE else ""
        super().__init__(f"The run was stopped by {why or signal.Signals(signum).name + read}.")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for this signal: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + self.signum


def as_error(stop: BaseException) -> Exception:
    """Return what ended a run as an Exception: Kedro's session tells its hooks of nothing else."""
    if isinstance(stop, Exception):
        return stop
    error: Exception = TrainingError(f"The run was ended by {type(stop).__name__}: {str(stop) or 'no reason'}.")
    if isinstance(stop, TerminationSignal | KeyboardInterrupt):
        error = RunInterruptedError(getattr(stop, "signum", signal.SIGINT), getattr(stop, "why", ""))
    elif isinstance(stop.__context__, BrokenPipeError):  # rich ends the process so
        error = RunInterruptedError(signal.SIGPIPE)
    error.__cause__ = stop
    return error


@dataclass
class _State:
    """The state of the handlers, one for the process."""

    process: int = 0  # id of the one that set the handlers; forked workers inherit them
    blocks: int = 0  # nested ones of `raising_on_signals`
    deferring: int = 0  # nested blocks of `deferring_signals`
    held: int | None = None  # the signal that waits for the end of those
    first_at: float | None = None  # time of the first signal, in seconds
    finish_first: Callable[[int], None] | None = None  # takes the first signal in place of the exception


_state = _State()


def time_is_over(hours: float | None) -> str:
    """Return why a process stops that has run for so many hours or longer; empty: it goes on, or has no limit."""
    over = hours is not None and time() - psutil.Process().create_time() >= 3600.0 * hours
    return f"ppo.max_time={hours:g} hours" if over else ""


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise `TerminationSignal` on the SIGNALS within the block; restore the former handlers after it.

    Does nothing outside the main thread, where Python allows no handlers. A signal that is ignored (`nohup`, a shell's
    background job) stays ignored. Blocks may be nested: the outermost one decides which signal is the first.
    """
    if not _in_main_thread():
        yield
        return
    if _state.blocks == 0:
        _state.process, _state.first_at, _state.held = os.getpid(), None, None
    _state.blocks += 1
    former = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _handle)
    try:
        yield
    finally:
        for signum, handler in former.items():
            if handler is not None:  # None: it was set from outside Python and cannot be restored
                signal.signal(signum, handler)
        _state.blocks -= 1


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Hold `TerminationSignal` back until the end of the block, for short work that must not be cut: a database call.

    Interrupted, SQLAlchemy may keep its connection and SQLite's lock, and the run could not be marked as killed. A call
    to a server may also hang: another signal while one is held back ends the process at once.
    """
    if not _in_main_thread():
        yield
        return
    _state.deferring += 1
    try:
        yield
    finally:
        _state.deferring -= 1
        if _state.deferring == 0 and _state.held is not None:
            signum, _state.held = _state.held, None
            raise TerminationSignal(signum)


@contextmanager
def finishing_first(grace_s: float, ask: Callable[[int], str], say: Callable[[str], None]) -> Iterator[None]:
    """Let the first signal within the block call `ask(signum)` instead of raising an exception.

    The block should end soon after that. If it has not ended after `grace_s` seconds, `TerminationSignal` is raised.
    `ask` returns the line that says so, which `say` logs in a thread. Called in the signal handler, `ask` may interrupt
    any line of Python: it must not wait for a lock, and a logging handler has one.
    """
    if not _in_main_thread():
        yield
        return
    # the signal with its line, None at the end of the block; the only queue whose `put` a signal handler may call
    requests: SimpleQueue[tuple[int, str] | None] = SimpleQueue()

    def stop_after_grace() -> None:
        if (request := requests.get()) is None:
            return
        signum, line = request
        say(line)
        with suppress(Empty):
            requests.get(timeout=grace_s)
            return
        name = signal.Signals(signum).name
        say(f"{name}: shutdown_grace_s={grace_s:g} is over; stopping now, the last checkpoint stands.")
        _state.first_at = float("-inf")  # the next signal is no repetition of the first
        signal.pthread_kill(threading.main_thread().ident or 0, signum)

    watch = threading.Thread(target=stop_after_grace, name="shutdown", daemon=True)
    watch.start()
    _state.finish_first = lambda signum: requests.put((signum, ask(signum)))
    try:
        yield
    finally:
        _state.finish_first = None
        requests.put(None)
        watch.join()


def _handle(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGHUP:  # the terminal is being closed: the run would fail as it prints to it
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    if os.getpid() != _state.process:  # a forked worker has no iteration to finish, and its pool waits for its end
        raise TerminationSignal(signum)
    now, first_at = monotonic(), _state.first_at
    if first_at is not None and now - first_at < SAME_REQUEST_S:
        return
    _state.first_at = now if first_at is None else first_at
    if first_at is None and _state.finish_first is not None:
        _state.finish_first(signum)
    elif not _state.deferring:
        raise TerminationSignal(signum)
    elif _state.held is None:
        _state.held = signum
    else:
        os.write(2, f"{signal.Signals(signum).name}: ended at once, because a call did not end.\n".encode())
        os._exit(128 + signum)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
