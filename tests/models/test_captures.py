"""Functions that run eagerly once, are captured, and are then replayed."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ppo_rlhf.models import captures as module
from ppo_rlhf.models.captures import Captures
from tests.graph_on_cpu import graphs_on_cpu

__all__ = ["graphs_on_cpu"]  # a fixture
CPU = torch.device("cpu")


@dataclass
class Buffers:
    total: Tensor

    @property
    def bytes(self) -> int:
        return self.total.nbytes


class Counter:
    """Adds `summand` to a buffer. The Python number `calls` is not part of a graph."""

    def __init__(self) -> None:
        self.total, self.summand, self.calls = torch.zeros(3), torch.ones(3), 0

    def __call__(self) -> None:
        self.calls += 1
        twice = self.summand * 2
        self.total += twice


def test_the_first_run_is_plain_the_second_is_captured_and_later_ones_are_replayed(graphs_on_cpu):
    captures, add = Captures(CPU), Counter()
    calls, sums = [], []
    for run in range(5):
        add.summand.fill_(run)
        captures.run(("add",), add)
        calls.append(add.calls)
        sums.append(add.total[0].item())
    assert calls == [1, 2, 2, 2, 2]
    assert sums == [0.0, 2.0, 6.0, 12.0, 20.0]
    assert (len(captures), graphs_on_cpu.captures, graphs_on_cpu.replays) == (1, 1, 4)


def test_each_key_has_a_graph_of_its_own(graphs_on_cpu):
    captures, counters = Captures(CPU), {key: Counter() for key in (("a",), ("a", 2))}
    for _ in range(3):
        for key, add in counters.items():
            captures.run(key, add)
    assert [add.total.tolist() for add in counters.values()] == [[6.0] * 3] * 2
    assert len(captures) == 2


@pytest.mark.parametrize("how", ["on a CPU", "not wanted"])
def test_without_captures_every_run_is_plain(how, request):
    if how == "not wanted":
        request.getfixturevalue("graphs_on_cpu")
    captures, add = Captures(CPU, wanted=how != "not wanted"), Counter()
    for _ in range(4):
        captures.run(("add",), add)
    assert (captures.on, add.calls, len(captures)) == (False, 4, 0)


def test_a_python_number_that_changes_between_runs_is_not_repeated(graphs_on_cpu):
    """The emulation shows that a function with changing Python state must not be captured."""
    captures, total, number = Captures(CPU), torch.zeros(1), iter(range(10))
    for _ in range(4):
        captures.run(("count",), lambda: total.add_(next(number)))
    assert total.item() == 0 + 1 + 1 + 1  # eager runs would give 0 + 1 + 2 + 3


def test_where_a_function_cannot_be_captured_its_run_and_all_later_ones_are_plain(graphs_on_cpu, caplog):
    """Other kinds of work continue, and are captured again."""
    captures, add, total = Captures(CPU), Counter(), torch.zeros(2)
    captures.held["reads"] = Buffers(total)
    for _ in range(3):
        captures.run(("add",), add)

    def reads() -> None:
        total.add_(1)
        if total.sum().item() > 0:
            total.add_(1)

    for _ in range(3):
        captures.run(("reads",), reads)
    assert (captures.serves("reads"), len(captures), captures.held) == (False, 0, {})
    for _ in range(3):
        captures.run(("add",), add)
    assert total.tolist() == [6.0, 6.0]
    assert add.total.tolist() == [12.0] * 3
    assert (captures.serves("add"), len(captures), add.calls) == (True, 1, 4)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "not permitted when stream is capturing" in line.getMessage()
    assert "The reads runs without CUDA graphs from here on" in line.getMessage()


def test_what_a_failed_capture_made_is_gone_before_the_plain_run(graphs_on_cpu):
    """Otherwise its activations would be on the device twice, although memory did not suffice for one copy."""
    captures, made, alive = Captures(CPU), [], []

    def reads() -> None:
        alive.append([tensor() is not None for tensor in made])
        found = torch.ones(3) * 2
        made.append(weakref.ref(found))
        found.sum().item()

    for _ in range(2):
        captures.run(("reads",), reads)
    assert alive == [[], [False], [False, False]]  # eager run, failed capture, eager run


def test_what_is_released_can_be_captured_again(graphs_on_cpu, caplog):
    caplog.set_level(logging.INFO)
    captures, add = Captures(CPU), Counter()
    captures.held["buffers"] = Buffers(torch.empty(2**26))
    assert captures.bytes == 2**28
    captures.say_once()
    assert not caplog.messages
    for _ in range(2):
        captures.run(("add",), add)
    for _ in range(2):
        captures.say_once()
    assert caplog.messages == ["captured: 1 graphs, 0.2 GiB"]
    captures.release()
    assert (len(captures), captures.bytes, captures.held) == (0, 0, {})
    for _ in range(3):
        captures.run(("add",), add)
    assert (len(captures), add.total.tolist()) == (1, [10.0] * 3)


@pytest.mark.parametrize("fails", [False, True], ids=["normally", "by an error"])
def test_behind_training_nothing_is_captured_until_there_is_another(graphs_on_cpu, caplog, fails):
    caplog.set_level(logging.INFO)
    captures, add = Captures(CPU), Counter()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext(), captures.during():
            captures.held["buffers"] = Buffers(torch.empty(2**26))
            for _ in range(3):
                captures.run(("add",), add)
            assert captures.on
            if fails:
                raise KeyboardInterrupt
        assert (captures.on, len(captures), captures.held) == (False, 0, {})
        captures.run(("add",), add)
    assert add.calls == 2 * (2 + 1)
    assert add.total.tolist() == [16.0] * 3
    assert caplog.messages == ["captured: 1 graphs, 0.2 GiB"]  # the second training captured no more graphs


def test_one_kind_of_work_can_be_released_alone(graphs_on_cpu):
    captures, counters = Captures(CPU), {key: Counter() for key in (("a", 1), ("a", 2), ("b", 1))}
    captures.held |= {"a": Buffers(torch.zeros(3)), "b": Buffers(torch.zeros(5))}
    for _ in range(2):
        for key, add in counters.items():
            captures.run(key, add)
    captures.release("a")
    assert (len(captures), list(captures.held), captures.bytes) == (1, ["b"], 20)
    for key, add in counters.items():
        captures.run(key, add)
    assert [add.calls for add in counters.values()] == [3, 3, 2]
    assert [add.total[0].item() for add in counters.values()] == [6.0] * 3


def test_a_pool_without_graphs_is_not_used_again(graphs_on_cpu, monkeypatch):
    """torch refuses a capture into a pool without graphs while a tensor of the pool is alive.

    A key that ran only once has no graph yet.
    """
    captures, add, pools = Captures(CPU), Counter(), []
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: pools.append(how["pool"]) or graph)
    for key in ("a", "a", "b", "b"):
        captures.run((key,), add)
        if len(captures) == 1 and key == "b":
            captures.release("a")
    assert pools == [(0, 1), (0, 2)]


@pytest.mark.parametrize("error", [RuntimeError("capture invalidated"), ValueError("mine"), KeyError()])
def test_any_failed_capture_ends_its_allocations_in_the_runs_own_pool(graphs_on_cpu, monkeypatch, error):
    """torch's capture_end raises before it tells the allocator, if CUDA has invalidated the capture."""
    captures, add, fails = Captures(CPU), Counter(), []

    def failing() -> None:
        fails.append(None)
        if len(fails) == 2:
            raise error

    for _ in range(2):
        captures.run(("add",), add)
    assert graphs_on_cpu.ended == []
    for _ in range(2):
        captures.run(("fails",), failing)
    assert graphs_on_cpu.ended == [(0, 1)]
    assert len(fails) == 3  # eager run, failed capture, eager run
    assert captures.trouble["fails"]
    captures.run(("add",), add)
    captures.run(("add",), add)
    assert (len(captures), captures._pool) == (1, (0, 2))


def test_the_bytes_of_a_pool_are_those_of_all_its_graphs_until_they_are_released(graphs_on_cpu, monkeypatch):
    reserved = iter((0, 10, 10, 30, 0, 7))
    monkeypatch.setattr(module, "_reserved", lambda device: next(reserved))
    captures, add = Captures(CPU), Counter()
    for key in ("a", "a", "b", "b"):
        captures.run((key,), add)
    assert captures.bytes == 10 + 20
    captures.release()
    assert captures.bytes == 0
    for _ in range(2):
        captures.run(("c",), add)
    assert captures.bytes == 7


def test_a_capture_on_another_device_leaves_the_current_device_as_it_was(monkeypatch):
    """torch's set_stream makes the stream's device the current one."""
    current = [0]
    for name, fake in {
        "CUDAGraph": SimpleNamespace,
        "graph": lambda graph, **_: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: current[-1],
        "set_stream": lambda stream: current.append(1),
        "set_device": current.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(module, "_current_stream", lambda device: "a stream of cuda:1")
    monkeypatch.setattr(module, "_device_syncs_are_errors", lambda device: nullcontext())
    monkeypatch.setattr(module, "_reserved", lambda device: 0)
    Captures(torch.device("cuda:1"))._captured(lambda: None)
    assert current == [0, 1, 0]


@pytest.mark.gpu
def test_on_a_gpu_a_sync_that_torch_does_not_see_leaves_the_allocator_free_to_give_memory_back():
    """A synchronisation by CUDA itself invalidates the capture; torch's debug mode does not see it."""
    device, calls = torch.device("cuda"), []
    captures = Captures(device)

    def synchronises() -> None:
        calls.append(torch.ones(2**20, device=device))
        if len(calls) == 2:
            torch.cuda.synchronize()

    for _ in range(2):
        captures.run(("synchronises",), synchronises)
    assert "synchronises" in captures.trouble
    calls.clear()
    large = torch.ones(2**28, device=device)
    before = torch.cuda.memory_reserved()
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 2**30
    add = Counter()
    add.total, add.summand = add.total.to(device), add.summand.to(device)
    for _ in range(3):
        captures.run(("add",), add)
    assert len(captures) == 1
    assert add.total.tolist() == [6.0] * 3


def test_graphs_keep_nothing_alive_once_they_are_released(graphs_on_cpu):
    captures, add = Captures(CPU), Counter()
    alive = torch.utils.weak.WeakIdRef(add.total)
    for _ in range(2):
        captures.run(("add",), add)
    captures.release()
    del add
    gc.collect()
    assert alive() is None


def test_graphs_that_would_keep_more_than_a_quarter_of_the_card_are_given_up(graphs_on_cpu, monkeypatch, caplog):
    """Before a capture the buffers count, and after it also the pool. A run over the limit is eager and completes."""
    monkeypatch.setattr(module, "card_bytes", lambda device: 4 * 100)
    given_up = []
    for buffer, pool in ((60, 40), (60, 44), (104, 0)):
        reserved = iter((0, pool))
        monkeypatch.setattr(module, "_reserved", lambda device, reserved=reserved: next(reserved))
        captures, add = Captures(CPU), Counter()
        captures.held["add"] = Buffers(torch.zeros(buffer // 4))
        for _ in range(3):
            captures.run(("add",), add)
        assert add.total.tolist() == [6.0] * 3
        given_up.append(not captures.serves("add"))
        assert len(captures.held) == captures.serves("add")
    assert given_up == [False, True, True]
    assert ["may keep" in record.getMessage() for record in caplog.records] == [True, True]


@pytest.mark.gpu
def test_on_a_gpu_graphs_are_replayed_on_new_values_and_give_their_memory_back():
    device = torch.device("cuda", torch.cuda.current_device())
    weight, given, sums = (torch.ones(512, 512, device=device) for _ in range(3))
    gradient = torch.zeros(512, 512, device=device)
    weight.requires_grad_()
    weight.grad = gradient

    def work() -> None:
        loss = (given @ weight).square().mean()
        loss.backward()
        sums.add_(loss.detach())

    captures, found, expected = Captures(device), [], []
    for run in range(5):
        given.fill_(run)
        gradient.zero_()
        captures.run(("work",), work)
        found.append(gradient.clone())
        assert weight.grad is gradient
        gradient.zero_()
        work()
        expected.append(gradient.clone())
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert len(captures) == 1
    assert captures.bytes > 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    before = torch.cuda.memory_reserved()
    captures.release()
    assert torch.cuda.memory_reserved() < before


@pytest.mark.gpu
def test_on_a_gpu_a_capture_that_fails_leaves_stream_and_numbers_as_they_were():
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.zeros(2, device=device)
    captures = Captures(device)

    def reads() -> None:
        total.add_(1)
        if total.sum().item() > 0:
            total.add_(1)

    for _ in range(4):
        captures.run(("reads",), reads)
    assert not captures.serves("reads")
    for _ in range(3):  # torch's allocator accepts no capture into a pool after a capture into it failed
        captures.run(("adds",), lambda: total.add_(0))
    assert (len(captures), captures.serves("adds")) == (1, True)
    assert total.tolist() == [8.0, 8.0]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.ones(3, device=device).sum().item() == 3.0
