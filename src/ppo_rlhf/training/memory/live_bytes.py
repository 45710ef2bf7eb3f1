"""Counting the bytes of all tensors that are alive, and their peak, while code runs on torch's fake tensors.

Fake tensors have shapes, types and devices, but no data: a pass through a model of billions of parameters takes seconds
and no memory. What an operation needs inside itself (a kernel's workspace) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAPPED_FROM = 32 * 2**20
"""glibc's M_MMAP_THRESHOLD cannot rise above this (DEFAULT_MMAP_THRESHOLD_MAX of 64-bit systems): larger blocks are
mapped one by one and given back at once, smaller ones come from the heap."""


@dataclass(frozen=True)
class Peak:
    """Bytes alive at a peak, and how many of them are in blocks that come from the heap."""

    total: int = 0
    in_heap: int = 0

    def __add__(self, other: Peak) -> Peak:
        """Return the peak of what is alive together."""
        return Peak(self.total + other.total, self.in_heap + other.in_heap)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations made and that something still holds; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = self._peak = Peak()
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._take(leaf.untyped_storage())
        return result

    @property
    def now(self) -> Peak:
        """What is alive."""
        return self._now

    def peak_since(self, before: Peak, action: Callable[[], object]) -> Peak:
        """Run something; return the most that was alive meanwhile, beyond what was alive at `before`."""
        self._peak = self._now
        action()
        return Peak(self._peak.total - before.total, self._peak.in_heap - before.in_heap)

    def peak_of(self, action: Callable[[], object]) -> Peak:
        """Run something; return the most that was alive meanwhile, beyond what is alive now."""
        return self.peak_since(self._now, action)

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._drop(key, size))
        self._change(size)
        if self._now.total > self._peak.total:
            self._peak = self._now

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self._change(-size)

    def _change(self, size: int) -> None:
        in_heap = size if abs(size) < MAPPED_FROM else 0
        self._now = Peak(self._now.total + size, self._now.in_heap + in_heap)


@contextmanager
def counting() -> Iterator[LiveBytes]:
    """Within the block every new tensor is fake, and counted."""
    with FakeTensorMode(), LiveBytes() as live:
        yield live


def storage_sizes(tensors: Iterable[Tensor], known: set[int]) -> list[int]:
    """Return the bytes of each storage that is not yet known, and note it as known."""
    sizes = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            sizes.append(storage.nbytes())
    return sizes


def in_blocks(sizes: Iterable[int]) -> Peak:
    """Return blocks of these sizes that are alive together."""
    sizes = list(sizes)
    return Peak(sum(sizes), sum(size for size in sizes if size < MAPPED_FROM))
