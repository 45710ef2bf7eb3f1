"""SIGTERM and SIGINT as exceptions, so that a stopped run closes what it opened and says so.

Node code may hold `except Exception` clauses, so what interrupts it is a BaseException; Kedro's session tells its hooks
only of Exceptions, so at the runner's edge it becomes one.

The first signal may wait (`asking_before_stop`) or has to (`deferring_signals`); a second one stops at once.

Python drops an exception that is raised in a finaliser (`__del__`, a weak reference's callback): a signal that comes
there is delivered again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from types import FrameType

from ppo_rlhf.core.errors import PPORLHFError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 0.1
"""What follows the first signal this soon is the same request: `timeout` signals the process, then its whole group."""
AGAIN_S = 0.01
"""So long after a finaliser dropped what a signal raised, the signal comes again."""
PATIENCE_S = 2.0
"""So long after the first signal a second one does not wait for work that must not be cut: it may hang."""


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
    (`nohup`, a shell's background job) stays ignored. Which signal is the first is counted from the outermost block.
    """
    if not _in_main_thread():
        yield
        return
    if _state.blocks == 0:
        _state.first_at, _state.dropped, _state.process = None, False, os.getpid()
    _state.blocks += 1
    former = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _stop)
    former_hook, sys.unraisablehook = sys.unraisablehook, _delivering_again(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = former_hook
        for signum, handler in former.items():
            if handler is not None:  # None: it was set from outside Python and cannot be put back
                signal.signal(signum, handler)
        _state.blocks -= 1


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Hold `TerminationSignal` back until the end of the block: for short work that must not be cut in two.

    A database call is such work: interrupted, SQLAlchemy may keep its connection, and with it SQLite's lock, so that
    the run could not even be marked as killed (1 in 15 interruptions of an MLflow call, measured). Such a call can also
    hang, if its server does: a second signal two seconds after the first ends the process on the spot.
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
def asking_before_stop(may_finish: Callable[[int], bool]) -> Iterator[None]:
    """Let the first signal within the block raise nothing where `may_finish(signum)` is True: then the block ends soon.

    `may_finish` runs in the handler, between any two bytecodes of the main thread. It must not wait for a lock that
    this thread may hold, so it must not log: a queue of a logging handler has such a lock, and a buffered stream
    refuses a second write within the first. `logging_from_handlers` gives it a way to.
    """
    if not _in_main_thread():
        yield
        return
    former, _state.may_finish = _state.may_finish, may_finish
    try:
        yield
    finally:
        _state.may_finish = former


@contextmanager
def logging_from_handlers(log: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function that has a line logged at once and is safe in a signal handler: another thread does the work."""
    lines: SimpleQueue[str | None] = SimpleQueue()  # the only queue whose `put` may interrupt itself

    def work() -> None:
        for line in iter(lines.get, None):
            log(line)

    thread = threading.Thread(target=work, name="lines of signal handlers", daemon=True)
    thread.start()
    try:
        yield lines.put
    finally:
        lines.put(None)
        thread.join()


@dataclass
class _State:
    """One for the process, because signal handlers are."""

    process: int = 0
    blocks: int = 0
    """Of `raising_on_signals`, nested."""
    deferring: int = 0
    """Blocks of `deferring_signals`, nested."""
    held: int | None = None
    """The signal held back by them."""
    first_at: float | None = None
    dropped: bool = False
    """A finaliser dropped what a signal raised: the next one is that signal again."""
    may_finish: Callable[[int], bool] | None = None


_state = _State()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _delivering_again(former: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], object]:
    """Return a `sys.unraisablehook` that delivers the signal again if it is a `TerminationSignal` that was dropped."""

    def hook(dropped: sys.UnraisableHookArgs) -> object:
        if not isinstance(dropped.exc_value, TerminationSignal):
            return former(dropped)
        _state.dropped = True
        main = threading.main_thread().ident
        if main is not None:
            again = threading.Timer(AGAIN_S, signal.pthread_kill, (main, dropped.exc_value.signum))
            again.daemon = True
            again.start()
        return None

    return hook


def _stop(signum: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.process:  # a forked worker: nothing here is its own to finish
        raise TerminationSignal(signum)
    now = monotonic()
    if _state.dropped:
        _state.dropped = False
    elif _state.first_at is None:
        _state.first_at = now
        if _state.may_finish is not None and _state.may_finish(signum):
            return
    elif now - _state.first_at < SAME_REQUEST_S:
        return
    elif _state.deferring and now - _state.first_at >= PATIENCE_S:
        os.write(2, f"Stopped on the spot by a second signal, {signal.Signals(signum).name}.\n".encode())
        os._exit(128 + signum)
    if _state.deferring:
        _state.held = signum
    else:
        raise TerminationSignal(signum)
