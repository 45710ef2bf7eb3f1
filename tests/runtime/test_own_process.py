"""Threads and processes that users' code leaves running. Tests of the callers check that it cannot end the run."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from ppo_rlhf.cli import commands

LEAVES = """
import multiprocessing, threading, time
from ppo_rlhf.runtime.own_process import name_what_keeps_it

class Child(multiprocessing.get_context("fork").Process):
    def run(self):
        time.sleep(1.0)

if {left}:
    threading.Thread(target=time.sleep, args=(1.0,), name="poller").start()
    threading.Thread(target=time.sleep, args=(9.0,), daemon=True).start()
    Child(name="worker").start()
name_what_keeps_it(0.2)
"""


@pytest.mark.parametrize("left", [True, False])
def test_threads_and_processes_for_which_python_waits_at_its_end_are_named(left: bool):
    ended = subprocess.run([sys.executable, "-c", LEAVES.format(left=left)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"The command has ended, .*: poller, worker\. Ctrl-C .*\n" if left else "", ended.stderr)


def test_a_run_names_them_also_if_it_fails(
    kedro: Callable[..., Result], toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    called: list[bool] = []
    monkeypatch.setattr(commands, "name_what_keeps_it", lambda: called.append(True))
    assert kedro(toy_project, "run", "--pipelines", "none").exit_code == 1
    assert called == [True]
