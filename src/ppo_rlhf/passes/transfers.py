"""Copies tensors and models to a device.

Many tensors are copied in one transfer, since each transfer costs as much as a small kernel. An offloaded or sharded
model is whole on a device only while the model computes. The model's tensors on the host, or its shards, stay unchanged
during the computation: after the computation the copies on the device are dropped, and nothing is copied back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppo_rlhf.passes.sharding import local_shard_of, whole

Item = TypeVar("Item")


def to_device(items: Sequence[Item], device: torch.device) -> list[Item]:
    """Copy dataclasses of CPU tensors to a device, with one transfer per dtype.

    Dataclasses may be nested. Fields that are not tensors are kept unchanged.
    """
    if device.type == "cpu":
        return list(items)
    tensors = [tensor for item in items for tensor in _tensors_of(item)]
    moved = zip(map(id, tensors), _copied(tensors, device), strict=True)
    return copy.deepcopy(list(items), dict(moved))


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of a device to the CPU, with one transfer and one device sync per dtype."""
    return _copied(tensors, torch.device("cpu"))


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    copied: dict[int, Tensor] = {}
    # A dict, not a set, so that all processes see the dtypes in the same order
    for dtype in {tensor.dtype: None for tensor in tensors}:
        numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[number].flatten() for number in numbers]).to(device)
        parts = flat.split([tensors[number].numel() for number in numbers])
        copied.update({n: part.view(tensors[n].shape) for n, part in zip(numbers, parts, strict=True)})
    return [copied[number] for number in range(len(tensors))]


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataclass, field by field, including the tensors of nested dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_of(getattr(value, field.name))


def to_host(model: nn.Module) -> None:
    """Move a frozen model to host memory, in place; with CUDA to pinned memory, from which copies are faster."""
    pin = torch.cuda.is_available()
    on_host: dict[int, Tensor] = {}
    for table, name, tensor in places(model):
        if id(tensor) not in on_host:
            host = tensor.detach().to("cpu")
            on_host[id(tensor)] = _like(tensor, host.pin_memory() if pin else host)
        table[name] = on_host[id(tensor)]


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep a whole model on a device within the `with` block: offloaded and sharded weights are copied to the device.

    A weight that several modules share is copied once. Do not train within the block, because the gradients would go to
    the copied weights. If the model is sharded, all processes must enter the block; within the block each process may
    run its own number of forward passes.
    """
    elsewhere = [at for at in places(model) if isinstance(at.tensor, DTensor) or not _is_on(at.tensor, device)]
    tensors = {id(at.tensor): at.tensor for at in elsewhere}
    copies = {key: _like(tensor, copied_to(tensor, device)) for key, tensor in tensors.items()}
    with replaced(elsewhere, copies):
        yield


class Place(NamedTuple):
    """A parameter or buffer, with the dictionary of its module that holds it and its name there."""

    table: dict[str, Any]
    name: str
    tensor: Tensor


@contextmanager
def replaced(at: Sequence[Place], by: Mapping[int, Tensor]) -> Iterator[None]:
    """Let modules use other tensors within the `with` block: `by` has the other tensor by `id(place.tensor)`."""
    try:
        for place in at:
            place.table[place.name] = by[id(place.tensor)]
        yield
    finally:
        for place in at:
            place.table[place.name] = place.tensor


@contextmanager
def refilled(*models: nn.Module) -> Iterator[None]:
    """Gather sharded models' weights on the host for the `with` block; shard the changed weights at the block's end."""
    shards = [at for model in models for at in places(model) if isinstance(at.tensor, DTensor)]
    with ExitStack() as stack:
        for model in models if shards else ():
            stack.enter_context(on_device(model, torch.device("cpu")))
        yield
        filled = [table[name] for table, name, _ in shards]
    with torch.no_grad():
        for (_, _, shard), values in zip(shards, filled, strict=True):
            shard.copy_(local_shard_of(values, shard))


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a whole copy of a tensor on a device; a copy from pinned memory is asynchronous."""
    return whole(tensor.detach()).to(device, non_blocking=True)


def places(model: nn.Module) -> list[Place]:
    """Return where a model holds its parameters and buffers."""
    return [
        Place(table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
