"""SIGTERM and SIGINT during a run."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.runtime import signals
from ppo_rlhf.runtime.signals import (
    RunInterruptedError,
    as_error,
    deferring_signals,
    finishing_first,
    raising_on_signals,
)
from ppo_rlhf.runtime.stop_exceptions import StopBeforeUpdate, TerminationSignal


@pytest.fixture
def hears_sighup():
    """Let the process hear SIGHUP, which `nohup pytest` ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hears_sighup")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_is_raised_even_in_code_that_catches_exceptions_and_the_handlers_are_restored(name, code):
    before = [signal.getsignal(signum) for signum in signals.SIGNALS]
    with pytest.raises(TerminationSignal) as stopped, raising_on_signals():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(5)
        except Exception:
            pytest.fail("swallowed")
    assert RunInterruptedError(stopped.value.signum).exit_code == code
    assert [signal.getsignal(signum) for signum in signals.SIGNALS] == before


def test_outside_the_main_thread_signal_handlers_are_left_alone():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with raising_on_signals(), deferring_signals(), finishing_first(1.0, lambda signum: ("", None), print):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])  # as in a background job or nohup
def test_a_signal_that_is_ignored_from_outside_stays_ignored(signum):
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        with raising_on_signals():
            os.kill(os.getpid(), signum)
    finally:
        signal.signal(signum, before)


@pytest.mark.parametrize(
    ("stop", "context", "line"),
    [
        (TerminationSignal(signal.SIGHUP), None, "The run was stopped by SIGHUP."),
        (KeyboardInterrupt(), None, "The run was stopped by SIGINT."),
        (SystemExit(1), BrokenPipeError(), "The run was stopped by SIGPIPE: nobody reads its output any more."),
        (SystemExit("no licence"), None, "The run was ended by SystemExit: no licence."),
        (asyncio.CancelledError(), None, "The run was ended by CancelledError: no reason."),
    ],
)
def test_whatever_ends_a_run_becomes_an_error_of_ours_with_the_reason(stop, context, line):
    stop.__context__ = context
    error = as_error(stop)
    assert isinstance(error, PPORLHFError)
    assert (str(error), error.__cause__) == (line, stop)


def test_an_exception_stays_what_it_is():
    error = ValueError("one")
    assert as_error(error) is error


def test_a_signal_during_work_that_must_not_be_cut_waits_for_its_end():
    done: list[str] = []
    with pytest.raises(TerminationSignal, match="SIGTERM"), raising_on_signals():  # noqa: PT012
        with deferring_signals():
            with deferring_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("behind")
    assert done == ["inner", "outer"]
    with raising_on_signals(), deferring_signals():
        pass  # no deferred signal is left


def test_the_first_signal_asks_and_the_next_one_is_raised_unless_it_repeats_the_first(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(signals, "monotonic", lambda: now[0])
    with pytest.raises(TerminationSignal, match="SIGINT"), raising_on_signals():  # noqa: PT012
        with finishing_first(60.0, lambda signum: asked.append(signum) or ("line", None), lambda line: None):
            signal.raise_signal(signal.SIGTERM)
            now[0] = 0.2
            signal.raise_signal(signal.SIGTERM)  # the same request: `timeout` sends each signal twice
            now[0] = 0.4
            assert asked == [signal.SIGTERM]
            signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")
    assert asked == [signal.SIGTERM]


def test_where_the_work_does_not_go_on_the_first_signal_is_raised_once_work_that_must_not_be_cut_is_done():
    done: list[str] = []
    stopping = partial(finishing_first, 60.0, lambda signum: ("line", StopBeforeUpdate(signum)), lambda line: None)
    with raising_on_signals(), stopping(), pytest.raises(StopBeforeUpdate, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    with raising_on_signals(), stopping(), pytest.raises(StopBeforeUpdate), deferring_signals():  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        done.append("work")
    assert done == ["work"]


def test_which_signal_is_the_first_is_counted_anew_in_each_run():
    for _ in range(2):
        with raising_on_signals(), finishing_first(60.0, lambda signum: ("line", None), lambda line: None):
            signal.raise_signal(signal.SIGTERM)


def test_the_line_of_a_signal_is_said_while_the_main_thread_holds_the_lock_of_the_log():
    said: list[str] = []
    lock = threading.Lock()  # not re-entrant, like the lock of `queue.Queue`

    def say(line: str) -> None:
        with lock:
            said.append(line)

    with raising_on_signals(), finishing_first(60.0, lambda signum: ("stopping", None), say), lock:
        signal.raise_signal(signal.SIGTERM)
        assert said == []
    assert said == ["stopping"]


def test_a_forked_worker_never_waits_so_that_a_pool_of_them_can_be_ended():
    with raising_on_signals(), finishing_first(60.0, lambda signum: ("line", None), lambda line: None):
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            except TerminationSignal:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


HANGING = """
    import signal, time
    from ppo_rlhf.runtime import signals

    signals.SAME_REQUEST_S = 0.0
    with signals.raising_on_signals(), signals.deferring_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)
"""


CLOSED = """
    import pathlib, sys, time
    from ppo_rlhf.runtime import signals

    asked = []
    ask = lambda signum: asked.append(signum) or ("", None)
    with signals.raising_on_signals(), signals.finishing_first(60.0, ask, print):
        print("ready", flush=True)
        while not asked:
            time.sleep(0.01)
        print("one more line", flush=True)
    pathlib.Path(sys.argv[1]).write_text("done")
"""


def test_what_is_printed_to_a_terminal_that_was_closed_does_not_end_the_work(tmp_path: Path):
    script, done = tmp_path / "closed.py", tmp_path / "done"
    script.write_text(textwrap.dedent(CLOSED))
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` ignores it
        os.execv(sys.executable, [sys.executable, str(script), str(done)])
    while b"ready" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert done.read_text() == "done"


def test_a_second_signal_while_one_waits_for_a_call_ends_the_process_in_one_line(tmp_path: Path):
    script = tmp_path / "hanging.py"
    script.write_text(textwrap.dedent(HANGING))
    done = subprocess.run([sys.executable, "-u", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 143
    assert done.stderr == "SIGTERM: ended at once, because a call did not return.\n"
