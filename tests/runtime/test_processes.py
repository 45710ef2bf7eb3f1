"""Launches, shards, and processes that end or hang. `ppo/test_processes.py` tests what several processes compute."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from ppo_rlhf.core.errors import ConfigError, LaunchError
from ppo_rlhf.ppo.precision import resolve_device
from ppo_rlhf.runtime import processes


def test_what_the_main_process_calls_alone_waits_for_no_other(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "join_processes", lambda: pytest.fail("it waits for the others"))
    with processes.alone():
        assert processes.after_main(lambda: "made") == "made"
        assert processes.from_all(1) == [1]
    with pytest.raises(pytest.fail.Exception):
        processes.from_all(1)


REFUSED = [
    ({"WORLD_SIZE": "2"}, "RANK"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS"),
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "accelerate launch --cpu"),
]


@pytest.mark.parametrize(("environment", "named"), REFUSED)
def test_a_launch_that_would_train_each_process_alone_is_refused(environment, named):
    with pytest.raises(LaunchError, match=named) as refusal:
        processes.check_launch(environment)
    assert "torchrun" in str(refusal.value)


ACCEPTED = [
    {},
    {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMPI_COMM_WORLD_SIZE": "2"},
    {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"},
]


@pytest.mark.parametrize("environment", ACCEPTED)
def test_one_process_or_joined_ones_are_accepted(environment):
    processes.check_launch(environment)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "ppo.gradient_accumulation_steps"),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", "ppo.max_grad_norm"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "ppo.dtype"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "ppo.compile"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:1", "ppo.device"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "ppo.use_peft"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "ppo.use_peft"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "True", "ppo.use_peft"),
    ],
)
def test_a_setting_of_accelerate_that_is_not_done_is_refused_with_the_name_of_ours(monkeypatch, name, value, ours):
    joined = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for environment in ({name: value}, {**joined, name: value}):
        with pytest.raises(ConfigError, match=f"^{name}={value}: ") as refusal:
            processes.check_launch(environment)
        assert ours in str(refusal.value)
        assert "\n" not in str(refusal.value)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        resolve_device("cpu")  # every stage and PPOTrainer call this first


def test_settings_as_accelerate_writes_them_where_nothing_was_asked_for_are_accepted():
    launched = {
        **{"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default"},
        **{"ACCELERATE_USE_CPU": "False", "ACCELERATE_USE_FSDP": "false"},
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }
    processes.check_launch(launched)


@pytest.mark.parametrize(("count", "processes_"), [(7, 2), (1, 4), (8, 4)])
def test_the_shares_of_all_processes_are_all_rows_in_order_and_nearly_equal(monkeypatch, count, processes_):
    monkeypatch.setenv("WORLD_SIZE", str(processes_))
    shares = []
    for rank in range(processes_):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(list(processes.own_share(count)))
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("lengths", "hands"),
    [
        ([9, 8, 7, 6, 5, 4], [[0, 3, 4], [1, 2, 5]]),  # snake: 0 1 | 1 0 | 0 1
        ([1, 2, 3, 4, 5], [[0, 1, 4], [2, 3]]),
        ([3, 3, 3, 3], [[0, 3], [1, 2]]),
        ([7], [[0], []]),
        ([], [[], []]),
    ],
    ids=str,
)
def test_rows_are_dealt_by_length_in_snake_order(monkeypatch, lengths, hands):
    assert processes.dealt_rows(lengths) == [list(range(len(lengths)))]  # with one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.dealt_rows(lengths) == hands


def test_dealt_processes_have_about_as_many_tokens_where_contiguous_shares_do_not(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    lengths = [int(length) for length in torch.arange(1, 65) ** 2]
    sums = [sum(lengths[row] for row in hand) for hand in processes.dealt_rows(lengths)]
    assert max(sums) < 1.01 * min(sums)
    assert len({len(hand) for hand in processes.dealt_rows(lengths)}) == 1


def test_the_rows_of_one_process_are_what_they_were():
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert torch.equal(processes.gather_dealt(given, [[0, 1, 2]]), given)
    assert torch.equal(processes.gather_dealt(given[[2, 0, 1]], [[2, 0, 1]]), given)
    assert processes.gather_dealt(torch.empty(0, 2), [[]]).shape == (0, 2)


def test_processes_whose_launcher_is_gone_end_with_one_line(monkeypatch: pytest.MonkeyPatch):
    def lost() -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "default_store", lost)
    reset = torch.distributed.DistNetworkError("Connection reset by peer")
    for error in (reset, RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")):
        first = processes.first_error(processes.first_error(error))
        assert isinstance(first, LaunchError)
        assert re.match("the launcher or process 0.* has ended", str(first))
    own = ValueError("odd")
    assert processes.first_error(own) is own


ENDS_AT_ONCE = """
import os, sys
from ppo_rlhf.runtime.processes import from_all, join_processes

import torch, accelerate.utils

children = []
for rank in range(8):
    if (child := os.fork()) == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="8", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = sys.argv[1]
        torch.set_num_threads(1)
        join_processes()
        sys.setswitchinterval(10)  # gloo's threads get Python only where this one gives it up
        from_all(rank)
        sys.exit()
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


ENDS_OR_HANGS = """
import logging, os, sys, time
from datetime import timedelta
from ppo_rlhf.runtime import processes

import torch, accelerate.utils

logging.basicConfig(format="%(message)s", stream=sys.stdout)
processes.SLOW_S, processes.PATIENCE = 0.5, timedelta(seconds=2)
for other, port in zip(["hangs", "fails", "ends"], sys.argv[1:]):
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            processes.from_all(rank)
            if rank == 1:
                if other == "fails":
                    processes.first_error(ValueError("odd"))
                time.sleep({"hangs": 6, "fails": 1, "ends": 0}[other])
                os._exit(1)
            try:
                processes.from_all(rank)
            except Exception as error:
                print(processes.first_error(processes.first_error(error)), flush=True)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""


def free_ports(number: int) -> list[str]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


@pytest.mark.slow
def test_a_process_that_hangs_fails_or_ends_is_named_by_the_one_that_waits_for_it():
    command = [sys.executable, "-c", ENDS_OR_HANGS, *free_ports(3)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    late = "Process 0 has waited 0 s for process 1."
    ended = "process 1 has ended, or has not reached this point for 0 minutes."
    assert done.stdout.splitlines() == [late, ended, late, "process 1 failed: ValueError: odd", ended], done.stderr


@pytest.mark.slow
def test_a_process_that_ends_right_after_it_heard_from_the_others_ends_well():
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, *free_ports(1)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
