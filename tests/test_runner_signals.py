"""SIGTERM and SIGINT while a run is on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from ppo_rlhf.runner import RunInterruptedError, TerminationSignal, deferring_signals, raising_on_signals

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


def test_a_signal_that_is_ignored_from_outside_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raising_on_signals():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_is_an_exception_so_that_kedro_tells_its_hooks():
    assert issubclass(RunInterruptedError, Exception)
    assert RunInterruptedError(signal.SIGTERM).exit_code == 143
