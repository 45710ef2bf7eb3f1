"""SIGTERM and SIGINT while a run is on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ppo_rlhf.runner import RunInterruptedError, TerminationSignal, deferring_signals, raising_on_signals, signals
from ppo_rlhf.runner.signals import asking_before_stop, logging_from_handlers

INTERRUPTED_RUN = """
    import os, signal, sys
    from kedro.io import DataCatalog
    from kedro.pipeline import Node, Pipeline
    from ppo_rlhf.runner import LoopRunner, RunInterruptedError

    def node():
        try:
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        except Exception:
            print("swallowed", file=sys.stderr)
        return 1

    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        LoopRunner().run(Pipeline([Node(node, None, "x")]), DataCatalog())
    except RunInterruptedError as error:
        print(error, error.exit_code, file=sys.stderr)
    print([signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before, file=sys.stderr)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_the_run_at_once_even_in_code_that_catches_exceptions(tmp_path: Path, name: str, code: int):
    script = tmp_path / "interrupted.py"
    script.write_text(textwrap.dedent(INTERRUPTED_RUN))
    done = subprocess.run([sys.executable, script, name], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == [f"The run was stopped by {name}. {code}", "True"]


def test_outside_the_main_thread_signal_handlers_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    inside: list[object] = []

    def work() -> None:
        with raising_on_signals():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


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
        pass  # nothing is left over


def test_a_signal_in_a_finaliser_which_drops_exceptions_is_delivered_again():
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(1000))

    ends: list[str] = []
    with pytest.raises(TerminationSignal, match="SIGTERM"), raising_on_signals():  # noqa: PT012
        Finalised()
        ends.append("finalised")
        time.sleep(10)
        ends.append("slept")
    assert ends == ["finalised"]


def test_what_else_a_finaliser_drops_is_reported_as_ever(monkeypatch: pytest.MonkeyPatch):
    class Finalised:
        def __del__(self) -> None:
            raise ValueError("dropped")

    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: reported.append(dropped.exc_value))
    former = sys.unraisablehook
    with raising_on_signals():
        Finalised()
    assert [str(error) for error in reported] == ["dropped"]
    assert sys.unraisablehook is former


def test_a_signal_that_is_ignored_from_outside_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raising_on_signals():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


SECOND_SIGNAL = """
    import os, signal, sys, time
    from ppo_rlhf.runner import TerminationSignal, deferring_signals, raising_on_signals, signals

    now = [0.0]
    signals.monotonic = lambda: now[0]
    try:
        with raising_on_signals(), deferring_signals():
            signal.raise_signal(signal.SIGINT)
            now[0] = float(sys.argv[1])
            signal.raise_signal(signal.SIGINT)
            print("went on")
    except TerminationSignal as stop:
        print("raised", stop)
"""


def second_signal_after(seconds: float, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "twice.py"
    script.write_text(textwrap.dedent(SECOND_SIGNAL))
    return subprocess.run([sys.executable, "-u", script, str(seconds)], capture_output=True, text=True, timeout=60)


def test_work_that_must_not_be_cut_is_left_on_the_spot_at_a_second_signal_two_seconds_after_the_first(tmp_path: Path):
    done = second_signal_after(2.0, tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Stopped on the spot by a second signal, SIGINT.\n"


def test_work_that_must_not_be_cut_has_two_seconds_to_end(tmp_path: Path):
    done = second_signal_after(1.9, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\nraised SIGINT\n", "")


def test_the_first_signal_may_wait_and_the_second_may_not(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(signals, "monotonic", lambda: now[0])
    asked: list[int] = []
    with pytest.raises(TerminationSignal, match="SIGINT"), raising_on_signals():  # noqa: PT012
        with asking_before_stop(lambda signum: not asked.append(signum)):
            signal.raise_signal(signal.SIGTERM)
            now[0] = 0.09
            signal.raise_signal(signal.SIGTERM)  # the same request: `timeout` sends each signal twice
            now[0] = 0.11
            assert asked == [signal.SIGTERM]
            signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")
    assert asked == [signal.SIGTERM]


def test_a_signal_that_may_not_wait_stops_at_once():
    with pytest.raises(TerminationSignal), raising_on_signals(), asking_before_stop(lambda signum: False):  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on")


def test_which_signal_is_the_first_is_counted_anew_in_each_run():
    for _ in range(2):
        with raising_on_signals(), asking_before_stop(lambda signum: True):
            signal.raise_signal(signal.SIGTERM)


def test_a_forked_worker_never_waits_so_that_a_pool_of_them_can_be_ended():
    with raising_on_signals(), asking_before_stop(lambda signum: True):
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            except TerminationSignal:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_line_from_a_signal_handler_is_logged_while_this_thread_holds_the_lock_of_the_log():
    logged: list[str] = []
    lock = threading.Lock()  # not re-entrant, as a queue's is

    def log(line: str) -> None:
        with lock:
            logged.append(line)

    former = signal.signal(signal.SIGUSR1, lambda *_: say("from the handler"))
    try:
        with logging_from_handlers(log) as say, lock:
            signal.raise_signal(signal.SIGUSR1)
            assert logged == []
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert logged == ["from the handler"]


def test_an_interruption_is_an_exception_so_that_kedro_tells_its_hooks():
    assert issubclass(RunInterruptedError, Exception)
    assert RunInterruptedError(signal.SIGTERM).exit_code == 143
