"""CUDA graphs of a training run: capture a function once, then replay all of its kernels with one launch.

Small kernels, such as the kernels of a decoding step, take longer to launch than to compute. `models.common_sizes` says
of which sizes steps and updates are captured.
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
"""Types of devices on which work is captured as CUDA graphs."""
_CARDS_SHARE = 4
"""CUDA graphs may keep 1/4 of a GPU's memory. Models whose CUDA graphs would need more memory gain little from CUDA
graphs: the models' kernels are large, and kernel launches take little of the time."""
DECODING, UPDATE = "decoding", "update"
"""Kinds of work that CUDA graphs replay. A kind is the first part of the keys of its CUDA graphs, and the key of its
buffers in `Captures.held`."""


def most_bytes(card: int) -> int:
    """Return the most bytes that CUDA graphs may keep on a GPU with `card` bytes of memory."""
    return card // _CARDS_SHARE


class Held(Protocol):
    """Buffers at fixed addresses that CUDA graphs read and write at each replay."""

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on the device."""


class Captures:
    """The CUDA graphs of one run, by key, and the graphs' buffers. All CUDA graphs of a run share one memory pool.

    A captured function must do the same operations on the same addresses each time. A captured function may read and
    change only tensors that keep their addresses, and must not read values from the device to the host. The temporary
    tensors of a captured function lie in the memory pool, where the next replay of any CUDA graph may overwrite them.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True, warns: bool = True) -> None:
        """Set the device of all CUDA graphs.

        Nothing is captured if `wanted` is False or the device is not a CUDA device. If `warns` is False, no warning is
        logged when a capture fails.
        """
        self.held: dict[Hashable, Held] = {}
        """Buffers by kind of work; `release` removes the buffers."""
        self.trouble: dict[Hashable, str] = {}
        """The kinds of work that are no longer captured, each with the reason."""
        self._device, self._wanted, self._warns = device, wanted, warns
        # For each key of work: None after the first run, a CUDA graph after the second run
        self._graphs: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None
        self._pool_bytes = 0
        # Use one stream for first runs and captures, because CUDA libraries keep a workspace for each stream.
        self._stream: torch.cuda.Stream | None = None
        self._logged_graphs = 0
        self._is_closed = False
        _all.add(self)

    @property
    def on(self) -> bool:
        """Whether work is captured as CUDA graphs at present."""
        return self._wanted and not self._is_closed and self._device.type in CAPTURED_ON

    def serves(self, kind: Hashable) -> bool:
        """Return whether work of the given kind is captured as CUDA graphs."""
        return self.on and kind not in self.trouble

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __bool__(self) -> bool:
        return True  # an object without graphs is still true, although its length is 0

    @property
    def bytes(self) -> int:
        """Bytes on the device of the buffers and of the graphs' memory pool."""
        return self._pool_bytes + sum(held.bytes for held in self.held.values())

    def run(self, key: tuple[Hashable, ...], function: Callable[[], None]) -> bool:
        """Run a function eagerly at the first call with its key, and as a CUDA graph at later calls.

        For each key, the first call runs the function eagerly, which loads the kernels; the second call captures the
        function and replays the CUDA graph; later calls replay the CUDA graph. If the capture fails, the function runs
        eagerly, and `give_up` ends captures of its kind. `run` returns whether the function ran eagerly in the call.
        """
        kind = key[0]
        if not self.serves(kind):
            function()
            return True
        if key not in self._graphs:
            with self._on_capture_stream():
                function()
            self._graphs[key] = None
            return True
        if self._graphs[key] is None and (why := self._capture_or_reason(key, function)):
            self.give_up(kind, why)
            function()
            return True
        graph = self._graphs[key]
        assert graph is not None
        graph.replay()
        return False

    def give_up(self, kind: Hashable, why: str) -> None:
        """Run a kind of work eagerly from now on, and log the reason if `warns` was set.

        All CUDA graphs and buffers are released, and other kinds of work are captured again, because torch accepts no
        capture into a memory pool after a capture into the pool has failed.
        """
        self.trouble[kind] = why
        self.release()
        if self._warns:
            log.warning("The %s runs without CUDA graphs from here on, its kernels launched one by one: %s", kind, why)

    def release(self, kind: Hashable | None = None) -> None:
        """Delete the CUDA graphs and buffers of one kind of work (None: of all kinds); later runs capture again."""
        keys = [key for key in self._graphs if kind in (None, key[0])]
        if keys and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # wait until the device is idle, because a graph may still be running
        for key in keys:
            del self._graphs[key]
        for held in [held for held in self.held if kind in (None, held)]:
            del self.held[held]
        if not len(self):
            self._pool, self._pool_bytes = None, 0
        if keys and self._device.type == "cuda":
            torch.cuda.empty_cache()  # without graphs, the allocator would keep the memory of the graphs' pool reserved

    @contextmanager
    def during(self) -> Iterator[None]:
        """Capture only within the `with` block; release all CUDA graphs and buffers at its end, also after an error."""
        self._is_closed = False
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Log the number of CUDA graphs if it grew since the last log, release all graphs, and end all captures."""
        if len(self) > self._logged_graphs:
            self._log_graphs()
        self.release()
        self._is_closed = True

    def say_once(self) -> None:
        """Log the number and size of the CUDA graphs once, as soon as a CUDA graph was captured."""
        if len(self) > 0 and not self._logged_graphs:
            self._log_graphs()

    def _log_graphs(self) -> None:
        self._logged_graphs = len(self)
        log.info("captured: %d graphs, %.1f GiB", len(self), self.bytes / 2**30)

    def _capture_or_reason(self, key: tuple[Hashable, ...], function: Callable[[], None]) -> str:
        """Capture a function and return ""; if the capture fails, return the reason.

        The reason is a text, not the exception, since an exception keeps the tensors of its stack frames alive.
        """
        try:
            self._check_room()
            self._graphs[key] = self._captured(function)
            self._check_room()
        except Exception as error:  # out of memory, a device sync, or an error that the plain run will raise again
            return in_one_line(error) or type(error).__name__
        return ""

    def _check_room(self) -> None:
        """Raise `RuntimeError` if CUDA graphs keep more than `most_bytes` of the GPU's memory."""
        if self.bytes > (limit := most_bytes(card_bytes(self._device))):
            raise RuntimeError(f"graphs would keep {self.bytes / 2**30:.1f} GiB, and may keep {limit / 2**30:.1f}")

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, before = torch.cuda.CUDAGraph(), _current_stream(self._device)
        device = None if before is None else torch.cuda.current_device()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # "thread_local": CUDA calls of other threads, such as copies to pinned memory, must not break this capture
            options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **options):
                reserved = _reserved(self._device)
                with _device_syncs_are_errors(self._device):
                    function()
                self._pool_bytes += _reserved(self._device) - reserved
        except BaseException:
            graph.reset()
            _failed_graphs.append(graph)
            _end_allocations(self._device, self._pool)
            raise
        finally:
            if before is not None:
                torch.cuda.set_stream(before)  # torch does not restore the current stream after an invalid capture
                torch.cuda.set_device(device)  # set_stream has made the stream's device the current one
        return graph

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        """Run the `with` block on the capture stream, after earlier and before later work of the current stream."""
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
            # Wait also after an error, because a kernel may still write into memory that is freed below
            current.wait_stream(self._stream)


def fixed_state(*models: nn.Module) -> dict[str, Hashable]:
    """Return what a CUDA graph of the models takes as fixed, by the names of weights, buffers and modules.

    Of a weight or buffer: its address and `requires_grad`. Of a module: its class, whether it is in training mode, its
    hooks, a `forward` of its own, and its attributes that are numbers, texts or None. If `fixed_state` has changed, a
    replay would compute what the models computed before.
    """
    state: dict[str, Hashable] = {}
    for place, model in enumerate(models):
        for kind in ("parameters", "buffers"):
            for name, tensor in getattr(model, f"named_{kind}")():
                state[f"{place}.{kind}.{name}"] = tensor.data_ptr(), tensor.requires_grad
        for name, module in model.named_modules():
            own = {key: value for key, value in vars(module).items() if type(value) in _PLAIN}
            hooks = [tuple(map(id, vars(module)[each].values())) for each in _HOOKS]
            forward = id(vars(module).get("forward"))
            state[f"{place}.modules.{name}"] = type(module), forward, tuple(hooks), tuple(sorted(own.items(), key=str))
    return state


_PLAIN = {bool, int, float, str, type(None)}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def pool_bytes(device: torch.device) -> int:
    """Return the bytes of this process's CUDA graph memory pools on a device, which torch counts as reserved memory."""
    return sum(captures._pool_bytes for captures in _all if captures._device == device)


_all: WeakSet[Captures] = WeakSet()
_failed_graphs: list[torch.cuda.CUDAGraph] = []
"""Empty CUDA graphs whose capture failed. The failed graphs are kept because torch's allocator may still refer to a
failed graph in later captures.
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CUDAGraph.cpp (capture_end)"""


@contextmanager
def _device_syncs_are_errors(device: torch.device) -> Iterator[None]:
    """Let torch raise an error at a device sync, which would break the capture. torch does not detect every sync."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its debug mode for device syncs is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _end_allocations(device: torch.device, pool: Any) -> None:
    """Tell torch's allocator that a failed capture no longer allocates in a pool, and give the capture's share back.

    If CUDA invalidates a capture, `capture_end` raises before it tells the allocator. The allocator then takes a
    capture for under way for ever: `empty_cache` does nothing, and an allocation that fails is not tried again.
    torch.cuda.memory.use_mem_pool ends its own allocations by the same two functions; there are no public ones.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:  # the capture had ended its allocations itself
        return
    torch._C._cuda_releasePool(index, pool)


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
