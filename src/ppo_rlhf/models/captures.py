"""CUDA graphs of a training run: a stretch of work is captured once, and then all of its kernels are launched at once.

Launching kernels one by one takes longer than computing them wherever they are small, as in a decoding step.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.core.logprobs import card_bytes

log = logging.getLogger(__name__)

CAPTURED_ON = ("cuda",)
"""Types of devices whose work is captured."""
CARDS_SHARE = 4
"""Graphs may keep this part of a GPU's memory, a quarter: what large models compute is no matter of launches."""
DECODING, UPDATE = "decoding", "update"
"""Kinds of work: the first part of their graphs' keys, and the key of their buffers in `Captures.held`."""


class Held(Protocol):
    """What graphs read and write in its place from run to run."""

    @property
    def bytes(self) -> int:
        """Bytes of its tensors on the device."""


class Captures:
    """The graphs of one run, by key, with the buffers that they use; all graphs share one pool of memory.

    A function that is captured does the same operations on the same addresses each time. It reads and changes only
    tensors that stay in their places, and reads nothing from the device. What it makes and drops lies in the pool,
    where the next replay of any graph may write.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True, warns: bool = True) -> None:
        """Take the device of all graphs; without `wanted`, or on a device that has none, everything runs plainly."""
        self.held: dict[Hashable, Held] = {}
        """Buffers by kind of work, until `release`."""
        self.trouble: dict[Hashable, str] = {}
        """Why a kind of work is not captured any more."""
        self._device, self._wanted, self._warns = device, wanted, warns
        self._graphs: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}  # None after the first run
        self._pool: Any = None
        self._pool_bytes = 0
        self._stream: torch.cuda.Stream | None = None  # of first runs and captures: libraries keep work space for each
        self._said = 0
        self._is_closed = False
        _all.add(self)

    @property
    def on(self) -> bool:
        """Whether anything is captured."""
        return self._wanted and not self._is_closed and self._device.type in CAPTURED_ON

    def serves(self, kind: Hashable) -> bool:
        """Return whether runs of a kind are captured."""
        return self.on and kind not in self.trouble

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __bool__(self) -> bool:
        return True  # also without a graph

    @property
    def bytes(self) -> int:
        """Bytes on the device of the buffers and of the graphs' pool."""
        return self._pool_bytes + sum(held.bytes for held in self.held.values())

    def run(self, key: tuple[Hashable, ...], function: Callable[[], None]) -> bool:
        """Run the function of a key: plainly the first time, which loads kernels; captured before the second; replayed.

        If it cannot be captured, its kind is given up, and this run is plain. Returns whether it was plain.
        """
        kind = key[0]
        if not self.serves(kind):
            function()
            return True
        if key not in self._graphs:
            with self._beside():
                function()
            self._graphs[key] = None
            return True
        if self._graphs[key] is None and (why := self._why_not_captured(key, function)):
            self.give_up(kind, why)
            function()
            return True
        graph = self._graphs[key]
        assert graph is not None
        graph.replay()
        return False

    def give_up(self, kind: Hashable, why: str) -> None:
        """Run a kind of work plainly from now on; the reason is logged, if this object `warns`.

        Everything is released, and other kinds are captured anew: after a capture that failed torch takes no other one
        into its pool of memory.
        """
        self.trouble[kind] = why
        self.release()
        if self._warns:
            log.warning("The %s runs without CUDA graphs from here on, its kernels launched one by one: %s", kind, why)

    def release(self, kind: Hashable | None = None) -> None:
        """Let go of all graphs and buffers, or of those of one kind. Later runs are captured anew.

        A kind is the key of its buffers in `held`, and the first part of the keys of its graphs.
        """
        keys = [key for key in self._graphs if kind in (None, key[0])]
        if keys and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a graph may still run
        for key in keys:
            del self._graphs[key]
        for held in [held for held in self.held if kind in (None, held)]:
            del self.held[held]
        if not len(self):
            self._pool, self._pool_bytes = None, 0
        if keys and self._device.type == "cuda":
            torch.cuda.empty_cache()  # a pool without graphs serves nobody else until then

    @contextmanager
    def during(self) -> Iterator[None]:
        """Capture within the block, and not behind it: the end of training, however it ends, releases everything."""
        self._is_closed = False
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Log what there was, release everything, and run plainly from now on."""
        if len(self) > self._said:
            self._say()
        self.release()
        self._is_closed = True

    def say_once(self) -> None:
        """Log how much is captured, if something is and was not said so before."""
        if len(self) > 0 and not self._said:
            self._say()

    def _say(self) -> None:
        self._said = len(self)
        log.info("captured: %d graphs, %.1f GiB", len(self), self.bytes / 2**30)

    def _why_not_captured(self, key: tuple[Hashable, ...], function: Callable[[], None]) -> str:
        """Capture a function; return why that failed, or "". The error is gone then, and the tensors that it keeps."""
        try:
            self._check_room()
            self._graphs[key] = self._captured(function)
            self._check_room()
        except RuntimeError as error:  # out of memory, or an operation that reads from the device
            return in_one_line(error)
        return ""

    def _check_room(self) -> None:
        """Raise `RuntimeError` if graphs keep so much that passes which are not captured might lack it."""
        if self.bytes > (most := card_bytes(self._device) // CARDS_SHARE):
            raise RuntimeError(f"they would keep {self.bytes / 2**30:.1f} GiB, and may keep {most / 2**30:.1f}")

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, before = torch.cuda.CUDAGraph(), _current_stream(self._device)
        try:
            # other threads, such as one that copies to pinned memory, must not end a capture
            options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **options):
                reserved = _reserved(self._device)
                with _waits_are_errors(self._device):
                    function()
                self._pool_bytes += _reserved(self._device) - reserved
        except BaseException:
            graph.reset()
            _spoilt.append(graph)
            raise
        finally:
            if before is not None:
                torch.cuda.set_stream(before)  # torch leaves the stream of an invalid capture in its place
        self._pool = self._pool or graph.pool()
        return graph

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the stream of captures, in order with the current one."""
        current = _current_stream(self._device)
        if current is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)  # also after an error: what runs there may write into what is freed here


def addresses(*models: nn.Module) -> tuple[int, ...]:
    """Return where the weights and buffers of models lie: graphs read them there."""
    return tuple(tensor.data_ptr() for model in models for tensor in (*model.parameters(), *model.buffers()))


def pool_bytes(device: torch.device) -> int:
    """Return the bytes of a device that graphs of this process hold: torch counts them as reserved, also while free."""
    return sum(each._pool_bytes for each in _all if each._device == device)


_all: WeakSet[Captures] = WeakSet()
_spoilt: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocator may still ask them about later captures, so they stay, and are empty.
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CUDAGraph.cpp (capture_end)"""


@contextmanager
def _waits_are_errors(device: torch.device) -> Iterator[None]:
    """Let torch refuse to wait for the device, before the wait spoils a capture; it does not see every wait."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
