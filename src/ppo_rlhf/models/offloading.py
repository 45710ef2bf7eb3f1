"""Models that are whole on a device only while they compute: offloaded ones wait on the host, others are sharded.

What waits stays as it is: going back drops the device's copies, and nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppo_rlhf.models.sharding import share_of, whole


def to_host(model: nn.Module) -> None:
    """Move a frozen model into the host's memory, in place: pinned memory if there is CUDA, which copies faster."""
    pin = torch.cuda.is_available()
    made: dict[int, Tensor] = {}
    for table, name, tensor in _entries(model):
        if id(tensor) not in made:
            host = tensor.detach().to("cpu")
            made[id(tensor)] = _like(tensor, host.pin_memory() if pin else host)
        table[name] = made[id(tensor)]


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep the whole model on the device within the block: weights that are elsewhere, or sharded, are copied there.

    Weights that several modules share are copied once. A gradient would go to the copy. Of a sharded model all
    processes enter the block; in it each makes its own passes.
    """
    elsewhere = [entry for entry in _entries(model) if isinstance(entry[2], DTensor) or not _is_on(entry[2], device)]
    copies: dict[int, Tensor] = {}
    try:
        for table, name, tensor in elsewhere:
            if id(tensor) not in copies:
                copies[id(tensor)] = _like(tensor, copied_to(tensor, device))
            table[name] = copies[id(tensor)]
        yield
    finally:
        for table, name, tensor in elsewhere:
            table[name] = tensor


@contextmanager
def refilled(*models: nn.Module) -> Iterator[None]:
    """Let sharded models have whole weights on the host within the block, and share out what those are at its end."""
    shards = [entry for model in models for entry in _entries(model) if isinstance(entry[2], DTensor)]
    with ExitStack() as stack:
        for model in models if shards else ():
            stack.enter_context(on_device(model, torch.device("cpu")))
        yield
        filled = [table[name] for table, name, _ in shards]
    with torch.no_grad():
        for (_, _, shard), values in zip(shards, filled, strict=True):
            shard.copy_(share_of(values, shard))


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a whole copy on a device; from pinned memory the copy is asynchronous."""
    return whole(tensor.detach()).to(device, non_blocking=True)


def _entries(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return each module's table, name and tensor for every parameter and buffer."""
    return [
        (table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
