"""SIGTERM, SIGINT and SIGHUP as exceptions, so that a stopped run closes its files and its MLflow run.

The exception that interrupts a node is a BaseException, because a node's code may contain `except Exception`. Kedro's
session reports only Exceptions to its hooks, so LoopRunner replaces every BaseException by an error.

PPOTrainer takes only Ctrl-C, as KeyboardInterrupt. Both let a first signal finish an update (`finishing_first`).
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, time
from types import FrameType

import psutil

from ppo_rlhf.core.errors import PPORLHFError, TrainingError
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_REQUEST_S = 0.3
"""A signal less than `SAME_REQUEST_S` seconds after the first signal counts as the same request to stop: `timeout` and
launchers send a signal to a process and then to its group."""


class RunInterruptedError(PPORLHFError, RuntimeError):
    """A run was stopped by a signal or by its time limit."""

    def __init__(self, signum: int, why: str = "") -> None:
        """Take the signal; a non-empty `why` replaces the signal's name in the message."""
        super().__init__(f"The run was stopped by {why or signal.Signals(signum).name}.")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for this signal: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + self.signum


def as_error(stop: BaseException) -> Exception:
    """Return the cause of a run's end as an Exception: Kedro's session reports only Exceptions to its hooks."""
    if isinstance(stop, Exception):
        return stop
    error: Exception = TrainingError(f"The run was ended by {type(stop).__name__}: {str(stop) or 'no reason'}.")
    if isinstance(stop, TerminationSignal | KeyboardInterrupt):
        error = RunInterruptedError(getattr(stop, "signum", signal.SIGINT), getattr(stop, "why", ""))
    # rich raises SystemExit when the reader of its output closes the pipe
    elif isinstance(stop.__context__, BrokenPipeError):
        error = RunInterruptedError(signal.SIGPIPE, "SIGPIPE: nobody reads its output any more")
    error.__cause__ = stop
    return error


@dataclass
class _State:
    """The state of the signal handlers of this process."""

    process: int = 0  # id of the process that set the signal handlers, because forked workers inherit the handlers
    blocks: int = 0  # number of nested `raising_on_signals` blocks that are open
    deferring: int = 0  # number of nested `deferring_signals` blocks that are open
    # Returns the exception that a signal raises; it is set by the outermost `raising_on_signals` block
    stop: Callable[[int], BaseException] = TerminationSignal
    held: BaseException | None = None  # raised when the outermost `deferring_signals` block ends
    first_at: float | None = None  # monotonic clock time in seconds of the first signal
    # Function that is called with the first signal, and returns the exception to raise; None if the work goes on
    finish_first: Callable[[int], BaseException | None] | None = None


_state = _State()


def time_is_over(hours: float | None) -> str:
    """Return the reason to stop if this process has run for `hours` or longer; an empty text if time is left or `hours`
    is None.
    """
    over = hours is not None and time() - psutil.Process().create_time() >= 3600.0 * hours
    return f"ppo.max_time={hours:g} hours" if over else ""


@contextmanager
def raising_on_signals(
    signums: Sequence[int] = SIGNALS, stop: Callable[[int], BaseException] = TerminationSignal
) -> Iterator[None]:
    """Raise `stop(signum)` on each signal of `signums` within the block; restore the former handlers after the block.

    Outside the main thread, where Python allows no signal handlers, `raising_on_signals` does nothing. An ignored
    signal (`nohup`, a shell's background job) stays ignored. `raising_on_signals` blocks may be nested; a new outermost
    block resets which signal counts as the first signal.
    """
    if not _in_main_thread():
        yield
        return
    if _state.blocks == 0:
        _state.process, _state.stop, _state.first_at, _state.held = os.getpid(), stop, None, None
    _state.blocks += 1
    former = {signum: signal.getsignal(signum) for signum in signums}
    for signum, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _handle)
    try:
        yield
    finally:
        for signum, handler in former.items():
            # The previous handler is None if code outside Python set it; Python cannot restore such a handler
            if handler is not None:
                signal.signal(signum, handler)
        _state.blocks -= 1


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Defer a signal's exception to the end of the block, for short work that must not be interrupted.

    An interrupted database call may leave SQLAlchemy with an open connection and SQLite's lock, and with SQLite's lock
    held the run could not be marked as killed. Because a call to a server may hang, a second signal during the block
    ends the process at once.
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
            held, _state.held = _state.held, None
            raise held


@contextmanager
def finishing_first(
    grace_s: float | None, ask: Callable[[int], tuple[str, BaseException | None]], say: Callable[[str], None]
) -> Iterator[None]:
    """Let the first signal within the block call `ask(signum)`, which returns a line and the exception to raise.

    If `ask` returns no exception, the work goes on. If the `finishing_first` block has then not ended after the grace
    (`grace`), the exception of `raising_on_signals` is raised; with `grace_s` None there is no limit. `say` logs the
    line, unless it is empty, in a thread. The signal handler calls `ask`, which can interrupt any line of Python, so
    `ask` must not wait for a lock. In particular `ask` must not log, because logging handlers use locks.
    """
    if not _in_main_thread():
        yield
        return
    # The queue holds (signal, log line), or None at the end of the block.
    # A signal handler may call only the `put` of a SimpleQueue: the methods of other queues wait for locks.
    requests: SimpleQueue[tuple[int, str] | None] = SimpleQueue()

    def stop_after_grace() -> None:
        if (request := requests.get()) is None:
            return
        signum, line = request
        if line:
            say(line)
        with suppress(Empty):
            requests.get(timeout=grace(signum, grace_s))
            return
        name = signal.Signals(signum).name
        say(f"{name}: shutdown_grace_s={grace_s:g} is over; stopping now, the last checkpoint stays valid.")
        # Forget the time of the first signal, so that the signal sent below does not count as a repetition
        _state.first_at = float("-inf")
        send_to_main_thread(signum)

    watch = threading.Thread(target=stop_after_grace, name="shutdown", daemon=True)
    watch.start()

    def finish_first(signum: int) -> BaseException | None:
        line, stop = ask(signum)
        requests.put((signum, line))
        return stop

    _state.finish_first = finish_first
    try:
        yield
    finally:
        _state.finish_first = None
        requests.put(None)
        watch.join()


def send_to_main_thread(signum: int) -> None:
    """Send a signal to the main thread, which also ends a wait of the main thread in a call."""
    signal.pthread_kill(threading.main_thread().ident or 0, signum)


def grace(signum: int, grace_s: float | None) -> float | None:
    """Return the seconds that a run may take to end after a signal; None without a limit.

    After Ctrl-C at a terminal there is no limit, because a user waits there and can send a second signal.
    """
    is_typed = signum == signal.SIGINT and os.isatty(0)
    return None if is_typed else grace_s


def _handle(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGHUP:  # the terminal is being closed, so printing to the terminal would fail
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    # A forked worker process exits at the signal, because only its parent has an iteration to finish
    if os.getpid() != _state.process:
        raise _state.stop(signum)
    now, first_at = monotonic(), _state.first_at
    if first_at is not None and now - first_at < SAME_REQUEST_S:
        return
    _state.first_at = now if first_at is None else first_at
    stop: BaseException | None = _state.stop(signum)
    if first_at is None and _state.finish_first is not None:
        stop = _state.finish_first(signum)
    if stop is None:
        return
    if not _state.deferring:
        raise stop
    if _state.held is None:
        _state.held = stop
    else:
        os.write(2, f"{signal.Signals(signum).name}: ended at once, because a call did not return.\n".encode())
        os._exit(128 + signum)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
