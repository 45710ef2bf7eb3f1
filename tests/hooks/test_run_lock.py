"""Locks on a run: one process at a time, freed whatever ends it, and not kept by its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.hooks.run_lock import RunLock, one_at_a_time

TAKE_AND_WAIT = """
import sys, time
from pathlib import Path
from ppo_rlhf.hooks.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
time.sleep(60)
"""


def other_process(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", TAKE_AND_WAIT, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_is_held_by_one_process_and_freed_when_that_is_killed(tmp_path: Path):
    process = other_process(tmp_path)
    try:
        assert RunLock.take(tmp_path) is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    lock = RunLock.take(tmp_path)
    assert lock is not None
    lock.release()


def test_a_released_lock_can_be_taken_by_another_process_and_its_file_stays(tmp_path: Path):
    lock = RunLock.take(tmp_path / "run")
    assert lock is not None
    lock.release()
    lock.release()
    assert (tmp_path / "run" / "run.lock").exists()
    process = other_process(tmp_path / "run")
    process.kill()
    process.wait()


def test_a_forked_worker_that_outlives_a_killed_run_does_not_keep_its_lock(tmp_path: Path):
    code = """
import os, sys, time
from pathlib import Path
from ppo_rlhf.hooks.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert RunLock.take(tmp_path) is None
        process.kill()
        process.wait()
        os.kill(worker, 0)  # still there
        lock = RunLock.take(tmp_path)
        assert lock is not None
        lock.release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"run\.lock: cannot be written, so no checkpoint could: "):
        RunLock.take(tmp_path / "file" / "run")


def test_where_files_cannot_be_locked_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("ppo_rlhf.hooks.run_lock.fcntl.lockf", refuse)
    lock = RunLock.take(tmp_path)
    assert lock is not None
    lock.release()
    assert "cannot be locked (No locks available)" in caplog.text


def test_one_process_at_a_time_comes_through_and_no_file_is_made(tmp_path: Path):
    code = """
import sys, time
from pathlib import Path
from ppo_rlhf.hooks.run_lock import one_at_a_time
with one_at_a_time(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(0.7)
    print(time.monotonic(), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    with one_at_a_time(tmp_path):
        entered = time.monotonic()
    left = float(process.stdout.read())
    process.wait()
    assert entered >= left
    assert list(tmp_path.iterdir()) == []
