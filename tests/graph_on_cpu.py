"""CUDA graphs emulated on a CPU: a replay repeats the captured torch operations on the same tensors.

Python code between two operations is not repeated: if the result depends on such code, a replay differs from an eager
run. As on CUDA, a capture leaves all tensors unchanged, and an operation that reads from the device makes it fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.config import ppo
from ppo_rlhf.models import captures

READING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("bincount", "repeat_interleave", "equal"),
}
"""Operations after which the host needs the result or the shape of the result: they force a device sync."""


def reads_from_the_device(func: Any, args: Any) -> bool:
    """Return whether an operation forces a device sync. Indexing by a mask does."""
    name = func._schema.name.removeprefix("aten::")
    by_mask = name.startswith("index") and any(index.dtype == torch.bool for index in tensors_of(args[1:2]))
    return name in READING or by_mask


class GraphOnCPU(TorchDispatchMode):
    """Replaces `torch.cuda.CUDAGraph`; used as a context manager, it captures the operations of the block."""

    replays = 0  # class-wide counts, over all graphs
    captures = 0

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors changed in place, with their old values
        self._created: dict[int, Tensor] = {}  # by storage; kept alive, so that no address is reused

    def reset(self) -> None:
        self._calls.clear()
        self._created.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads_from_the_device(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for value in (kwargs[each.name] for each in func._schema.arguments if each.name in kwargs and each.is_out):
            self._keep(value)
        result = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in tensors_of([args, kwargs])}
        self._created.update({at: tensor for tensor in tensors_of(result) if (at := _storage(tensor)) not in known})
        self._calls.append((func, args, kwargs, result))
        return result

    def _keep(self, value: Any) -> None:
        for tensor in tensors_of(value):
            if _storage(tensor) not in self._created and _storage(tensor) not in self._before:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self._before[_storage(tensor)] = whole, whole.clone()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, values in self._before.values():
                tensor.copy_(values)
        self._before.clear()
        type(self).captures += 1

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # the captured operations already include autocast's casts
    def replay(self) -> None:
        type(self).replays += 1
        for func, args, kwargs, captured in self._calls:
            returns = func._schema.returns
            if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
                continue  # an operation that returns a view need not be repeated
            result = func(*args, **kwargs)
            for old, new in zip(tensors_of(captured), tensors_of(result), strict=True):
                if _storage(old) != _storage(new):
                    old.copy_(new)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from tensors_of(part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> type[GraphOnCPU]:
    """Let `Captures` capture and replay on the CPU. The returned class counts captures and replays."""

    class Graph(GraphOnCPU):
        ended: ClassVar[list[tuple[int, int]]] = []  # pools whose allocations a failed capture ended

    monkeypatch.setattr(ppo, "GRAPHS_BY_DEFAULT", True)
    monkeypatch.setattr(captures, "CAPTURED_ON", ("cpu", "cuda"))
    pools = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(captures, "_end_allocations", lambda device, pool: Graph.ended.append(pool))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    return Graph
