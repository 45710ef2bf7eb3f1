"""SIGTERM and SIGINT as exceptions, so that a stopped run closes what it opened and says so.

Node code may hold `except Exception` clauses, so what interrupts it is a BaseException; Kedro's session tells its hooks
only of Exceptions, so at the runner's edge it becomes one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ppo_rlhf.core.errors import PPORLHFError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TerminationSignal(BaseException):
    """A signal asked this process to stop; raised wherever its main thread was."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class RunInterruptedError(PPORLHFError, RuntimeError):
    """A run was stopped by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"The run was stopped by {signal.Signals(signum).name}.")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that this signal ended: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + self.signum


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise `TerminationSignal` on SIGTERM and SIGINT within the block; restore the former handlers after it.

    Does nothing outside the main thread, where Python allows no handlers. A signal that was ignored from outside
    (`nohup`, a shell's background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _stop)
    try:
        yield
    finally:
        for signum, handler in former.items():
            if handler is not None:  # None: it was set from outside Python and cannot be put back
                signal.signal(signum, handler)


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Hold `TerminationSignal` back until the end of the block: for short work that must not be cut in two.

    A database call is such work: interrupted, SQLAlchemy may keep its connection, and with it SQLite's lock, so that
    the run could not even be marked as killed (1 in 15 interruptions of an MLflow call, measured).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferral.depth += 1
    try:
        yield
    finally:
        _deferral.depth -= 1
        if _deferral.depth == 0 and _deferral.signum is not None:
            signum, _deferral.signum = _deferral.signum, None
            raise TerminationSignal(signum)


@dataclass
class _Deferral:
    depth: int = 0
    signum: int | None = None


_deferral = _Deferral()


def _stop(signum: int, frame: FrameType | None) -> None:
    if _deferral.depth:
        _deferral.signum = signum
    else:
        raise TerminationSignal(signum)
