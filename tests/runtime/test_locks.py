"""Locks on a run: one process holds the lock, its end releases the lock, and child processes do not keep the lock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime.locks import is_let_go, lock_run, one_at_a_time

LOCK_AND_FORK = """
import os, sys, time
from pathlib import Path
from ppo_rlhf.runtime.locks import lock_run
lock = lock_run(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_by_one_process_and_freed_when_that_is_killed_though_a_forked_worker_lives_on(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", LOCK_AND_FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert lock_run(tmp_path) is None
        process.kill()
        process.wait()
        os.kill(worker, 0)  # the file of the lock stays
        lock = lock_run(tmp_path)
        assert lock is not None
        lock.close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_process_that_copies_its_own_directory_or_asks_for_it_again_keeps_the_lock(tmp_path: Path):
    with lock_run(tmp_path / "run") or pytest.fail("it is free"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")  # the copy opens and closes the locked file
        assert not is_let_go(tmp_path / "run")
        others = [
            subprocess.run(["flock", "--nonblock", str(tmp_path / name / "run.lock"), "true"]).returncode
            for name in ("run", "copy")
        ]
    assert others == [1, 0]
    assert is_let_go(tmp_path / "run")


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"run\.lock: "):
        lock_run(tmp_path / "file" / "run")


def test_a_directory_appears_with_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise another run with resume=latest could find the directory without its lock and resume the new run."""
    there: list[bool] = []
    monkeypatch.setattr("ppo_rlhf.runtime.locks.fcntl.flock", lambda *_: there.append((tmp_path / "run").exists()))
    lock = lock_run(tmp_path / "run")
    assert lock is not None
    lock.close()
    assert there == [False]
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "run.lock"]


def test_one_process_at_a_time_comes_through_says_that_it_waits_and_no_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other process lets go of the lock as soon as the wait for it is said, or else after a minute."""
    lines: list[str] = []

    def let_go(line: str, *values: object) -> None:
        lines.append(line % values)
        process.communicate()

    monkeypatch.setattr("ppo_rlhf.runtime.locks.SLOW_S", 0.3)
    monkeypatch.setattr("ppo_rlhf.runtime.locks.logger.warning", let_go)
    process = subprocess.Popen(["flock", str(tmp_path), "timeout", "60", "cat"], stdin=subprocess.PIPE)
    while subprocess.run(["flock", "--nonblock", str(tmp_path), "true"]).returncode == 0:
        pass  # the other process has not locked it
    with one_at_a_time(tmp_path):
        assert lines
    assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []
    with one_at_a_time(tmp_path):
        time.sleep(0.6)  # the block may take long
    (line,) = lines
    assert line.startswith(f"Waiting for another process that has locked {tmp_path}: a run that starts ")


def test_where_files_cannot_be_locked_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("ppo_rlhf.runtime.locks.fcntl.flock", refuse)
    assert lock_run(tmp_path) is not None
    assert "cannot be locked (No locks available)" in caplog.text


def test_the_working_directory_can_be_a_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = lock_run(Path())
    assert file is not None
    file.close()
