"""Modules, locks and signal handlers where Python lacks what only Unix has, as on Windows.

A process without these parts of Python stands in for Windows, so the tests show which names are used, not that Windows
behaves as expected.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

IMPORTS = """
    import importlib, os, pkgutil, signal, sys, threading, time, types
    import fcntl as real
    from pathlib import Path
"""
WITHOUT = """
    def locking(descriptor, mode, count):
        assert (mode, count) == ("without waiting", 1)
        try:
            real.flock(descriptor, real.LOCK_EX | real.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None

    for name in ("fcntl", "resource"):
        sys.modules[name] = None
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK="without waiting")
    del signal.SIGHUP, signal.SIGPIPE, signal.pthread_kill, os.fork, os.register_at_fork, os.getuid
"""


IMPORT_ALL = """
    def import_all():
        import ppo_rlhf

        for module in pkgutil.walk_packages(ppo_rlhf.__path__, "ppo_rlhf."):
            if not module.name.startswith("ppo_rlhf.starter") and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
"""


def run_without(code: str, *arguments: str, first: str = "") -> list[str]:
    """Run `first`, and then `code` without fcntl, resource, SIGHUP and forks; return the lines that are printed."""
    script = "".join(map(textwrap.dedent, (IMPORTS, first, WITHOUT, code)))
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_every_module_can_be_imported():
    """The libraries are imported before, because they ask for the system's name, and this system's is Linux."""
    libraries = """
        import_all()
        for name in [name for name in sys.modules if name.partition(".")[0] == "ppo_rlhf"]:
            del sys.modules[name]
    """
    code = """
        import_all()
        print("ppo_rlhf.pipelines.collect_feedback.nodes" in sys.modules)
    """
    printed = run_without(code, first=textwrap.dedent(IMPORT_ALL) + textwrap.dedent(libraries))
    assert printed[-1] == "True"


def test_a_lock_is_held_until_it_is_closed_and_a_folders_lock_until_the_block_ends(tmp_path: Path):
    code = """
        from ppo_rlhf.runtime.locks import is_let_go, lock_run, one_at_a_time

        run, folder = Path(sys.argv[1], "run"), Path(sys.argv[1])
        lock = lock_run(run)
        print(lock is not None, lock_run(run), is_let_go(run))
        lock.close()
        print(is_let_go(run))

        def wait():
            with one_at_a_time(folder):
                print("second")

        thread = threading.Thread(target=wait)
        with one_at_a_time(folder):
            thread.start()
            time.sleep(0.3)
            print("first")
        thread.join()
    """
    assert run_without(code, str(tmp_path)) == ["True None False", "True", "first", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ppo_rlhf.lock", "run"]


def test_handlers_are_set_and_the_end_of_the_grace_stops_the_main_thread():
    code = """
        from ppo_rlhf.runtime import signals

        said = []
        try:
            ask = lambda signum: ("asked", None)
            with signals.raising_on_signals(), signals.finishing_first(0.1, ask, said.append):
                signal.raise_signal(signal.SIGTERM)
                while True:
                    time.sleep(0.01)
        except signals.TerminationSignal as stop:
            print(signals.as_error(stop), said[0])
        print(signals.RunInterruptedError(signal.SIGINT))
        stop = SystemExit(1)
        stop.__context__ = BrokenPipeError()
        print(signals.as_error(stop), signals.as_error(stop).exit_code)
    """
    assert run_without(code, first="import psutil\n") == [
        "The run was stopped by SIGTERM. asked",
        "The run was stopped by SIGINT.",
        "The run was stopped by SIGPIPE: nobody reads its output any more. 141",
    ]
