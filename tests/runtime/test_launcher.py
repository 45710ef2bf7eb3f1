"""Processes of torchrun end together: after a signal to one of them, and when their launcher has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ppo_rlhf.runtime import launcher, processes
from ppo_rlhf.runtime.launcher import ending_together

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
OTHERS = {"nohup": {}, "srun": {"WORLD_SIZE": "2", "RANK": "1"}, "one process": {**TORCHRUN, "WORLD_SIZE": "1"}}
RANKS = """
import json, os, sys, time
from datetime import timedelta
from ppo_rlhf.runtime import launcher, processes
from ppo_rlhf.runtime.signals import raising_on_signals

launcher.LOOK_S, processes.PATIENCE = 0.05, timedelta(seconds=0.3)
for name, environment in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.environ.update(environment)
        with raising_on_signals(), launcher.ending_together():
            os.write(1, f"{name} begins\\n".encode())
            for sleep in range(2):
                try:
                    time.sleep(0.8)
                    os.write(1, f"{name} lives on\\n".encode())
                except BaseException as stop:
                    os.write(1, f"{name} {stop!r}\\n".encode())
        os._exit(0)
time.sleep(60)
"""


def test_only_processes_of_torchrun_end_when_their_parent_is_killed_even_if_they_ignore_the_signal():
    """The signal interrupts the first of two sleeps; a process that goes on nevertheless is ended in the second."""
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    command = [sys.executable, "-c", RANKS, json.dumps({"torchrun": TORCHRUN, **OTHERS})]
    with subprocess.Popen(command, env=kept, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        begun = {parent.stdout.readline().strip() for _ in range(4)}
        assert begun == {f"{name} begins" for name in ("torchrun", *OTHERS)}
        parent.kill()
        said = [line.strip() for line in parent.stdout]  # to the end of all processes
    assert sorted(said) == sorted(
        ["torchrun TerminationSignal('SIGTERM')", *(f"{name} lives on" for name in OTHERS for _ in range(2))]
    )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> torch.distributed.Store:
    """The store of a process that torchrun has started."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(launcher, "_store", lambda: store)
    monkeypatch.setattr(launcher, "LOOK_S", 0.05)
    monkeypatch.setattr(launcher, "PASS_ON_S", 0.1)
    return store


@contextmanager
def handling(signum: int) -> Iterator[list[int]]:
    handled: list[int] = []
    former = signal.signal(signum, lambda number, frame: handled.append(number))
    try:
        yield handled
    finally:
        signal.signal(signum, former)


def test_a_signal_is_passed_on_while_the_process_waits_in_c(store: torch.distributed.Store):
    with handling(signal.SIGTERM) as handled, ending_together():
        killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.2; kill -TERM {os.getpid()}"])
        store.wait(["ppo_rlhf/signal"], timedelta(seconds=10))  # Python runs no signal handler meanwhile
        killer.wait()
    assert store.get("ppo_rlhf/signal") == str(int(signal.SIGTERM)).encode()
    assert handled == [signal.SIGTERM]


def test_a_signal_that_another_process_got_comes_once(store: torch.distributed.Store):
    with handling(signal.SIGTERM) as handled, ending_together():
        store.set("ppo_rlhf/signal", str(int(signal.SIGTERM)))
        time.sleep(0.5)
    assert handled == [signal.SIGTERM]


def test_a_signal_that_all_processes_got_is_no_second_one(store: torch.distributed.Store):
    with handling(signal.SIGTERM) as handled, ending_together():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)
        store.set("ppo_rlhf/signal", str(int(signal.SIGTERM)))
        time.sleep(0.3)
    assert handled == [signal.SIGTERM]


def test_the_signal_of_a_forked_process_is_its_own(store: torch.distributed.Store):
    with handling(signal.SIGTERM), ending_together():
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.4)
        assert not store.check(["ppo_rlhf/signal"])
    assert signal.set_wakeup_fd(-1) == -1


def test_a_collective_without_the_store_goes_on_only_if_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch):
    def lost() -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "join_processes", lambda: None)
    monkeypatch.setattr(processes, "default_store", lost)
    monkeypatch.setattr(processes, "ENDS_S", 0.05)
    with pytest.raises(torch.distributed.DistNetworkError), processes.together():
        pytest.fail("the store is gone")
    processes.launcher_has_ended.set()
    try:
        with processes.together():
            pass
    finally:
        processes.launcher_has_ended.clear()


def test_a_block_that_runs_out_of_memory_is_not_counted_since_it_runs_again(monkeypatch: pytest.MonkeyPatch):
    reached = {"1": 0}

    def add(place: str, more: int) -> int:
        reached[place.rpartition("/")[2]] += more
        return reached["1"]

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "join_processes", lambda: None)
    monkeypatch.setattr(processes, "default_store", lambda: SimpleNamespace(add=add))
    with pytest.raises(RuntimeError, match="memory"), processes.together():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    assert reached["1"] == 0
    with pytest.raises(RuntimeError, match="other"), processes.together():
        raise RuntimeError("another error")
    assert reached["1"] == 1


REWARD_HANGS = """
import os, sys, time
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.launcher import ending_together
from ppo_rlhf.runtime.signals import as_error, finishing_first, raising_on_signals

def ask(signum):
    return "asked", None

try:
    with raising_on_signals(), finishing_first(1.0, ask, lambda line: None), ending_together():
        processes.from_all(0)
        rank = os.environ["RANK"]
        # torchrun runs Python with -u, where print writes its arguments one by one, between those of the other process
        os.write(1, f"begins {rank} {os.getpid()} {os.getppid()}\\n".encode())
        if rank == "0":
            time.sleep(200)
        processes.from_all(0)
except BaseException as stop:
    os.write(1, f"ends {os.environ['RANK']} {as_error(stop)}\\n".encode())
    sys.exit(143)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", ["the process that waits", "the launcher"])
@pytest.mark.parametrize("command", ["torch.distributed.run", "accelerate.commands.launch"])
def test_both_processes_end_while_a_reward_hangs(command: str, kills: str, tmp_path: Path):
    (tmp_path / "hangs.py").write_text(REWARD_HANGS)
    options = {
        "torch.distributed.run": ["--standalone", "--nproc_per_node", "2"],
        "accelerate.commands.launch": ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
    }
    started = [sys.executable, "-m", command, *options[command], str(tmp_path / "hangs.py")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(started, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        begun = {}
        for line in running.stdout:
            if line.startswith("begins"):
                _, rank, process, parent = line.split()
                begun[rank] = int(process)
                assert int(parent) == running.pid
            if len(begun) == 2:
                break
        at = time.monotonic()
        if kills == "the launcher":
            running.kill()
        else:
            os.kill(begun["1"], signal.SIGTERM)
        ends = [line for line in running.stdout if line.startswith("ends")]  # to the end of all processes
        assert time.monotonic() - at < 90.0
    assert "ends 0 The run was stopped by SIGTERM.\n" in ends
