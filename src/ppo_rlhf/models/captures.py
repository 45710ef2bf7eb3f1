"""CUDA graphs of a training run: a stretch of work is captured once, and then all of its kernels are launched at once.

Launching kernels one by one takes longer than computing them wherever they are small, as in a decoding step.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.core.logprobs import card_bytes

log = logging.getLogger(__name__)

CAPTURED_ON = ("cuda",)
"""Types of devices whose work is captured."""
CARDS_SHARE = 4
"""Graphs may keep this part of a GPU's memory, a quarter: what large models compute is no matter of launches."""


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

    def __init__(self, device: torch.device, *, wanted: bool = True, tells_trouble: bool = True) -> None:
        """Take the device of all graphs; without `wanted`, or on a device that has none, everything runs plainly."""
        self.held: dict[Hashable, Held] = {}
        """Buffers by kind of work, until `release`."""
        self.trouble: str | None = None
        """Why nothing is captured any more."""
        self._device, self._wanted, self._tells_trouble = device, wanted, tells_trouble
        self._graphs: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}  # None after the first run
        self._pool: Any = None
        self._pool_bytes = 0
        self._stream: torch.cuda.Stream | None = None  # of first runs and captures: libraries keep work space for each
        self._said = 0
        self._is_closed = False
        _all.add(self)

    @property
    def on(self) -> bool:
        """Whether runs are captured."""
        is_off = self._is_closed or self.trouble is not None
        return self._wanted and not is_off and self._device.type in CAPTURED_ON

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __bool__(self) -> bool:
        return True  # also without a graph

    @property
    def bytes(self) -> int:
        """Bytes on the device of the buffers and of the graphs' pool."""
        return self._pool_bytes + sum(held.bytes for held in self.held.values())

    def run(self, key: tuple[Hashable, ...], function: Callable[[], None]) -> None:
        """Run the function of a key: plainly the first time, which loads kernels; captured before the second; replayed.

        If it cannot be captured, that is logged, everything is released, and this run and all later ones are plain.
        """
        if not self.on:
            function()
            return
        if key not in self._graphs:
            with self._beside():
                function()
            self._graphs[key] = None
            return
        graph = self._graphs[key]
        if graph is None:
            try:
                self._check_room()
                graph = self._graphs[key] = self._captured(function)
                self._check_room()
            except RuntimeError as error:  # out of memory, or an operation that reads from the device
                self.give_up(in_one_line(error))
                function()
                return
        graph.replay()

    def give_up(self, why: str) -> None:
        """Release everything and run plainly from now on; the reason is logged, if this object `tells_trouble`."""
        self.trouble = why
        self.release()
        if self._tells_trouble:
            log.warning("CUDA graphs are off from here on, and kernels are launched one by one: %s", why)

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
        if not self._graphs:
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
                function()
                self._pool_bytes += _reserved(self._device) - reserved
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


def pool_bytes(device: torch.device) -> int:
    """Return the bytes of a device that graphs of this process hold: torch counts them as reserved, also while free."""
    return sum(each._pool_bytes for each in _all if each._device == device)


_all: WeakSet[Captures] = WeakSet()


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
