"""Frozen models that wait in the host's memory and lie on a device only while they compute.

The weights on the host stay where they are: going back is dropping the copies, and nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def to_host(model: nn.Module) -> None:
    """Put a frozen model into the host's memory, in place: pinned where there is CUDA, so that it is copied quickly."""
    pin = torch.cuda.is_available()
    made: dict[int, Tensor] = {}
    for table, name, tensor in _entries(model):
        if id(tensor) not in made:
            host = tensor.detach().to("cpu")
            made[id(tensor)] = _like(tensor, host.pin_memory() if pin else host)
        table[name] = made[id(tensor)]


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the block the model lies on the device; weights that were elsewhere are copied there for as long.

    Weights that several modules share are copied once. The model must be frozen: a gradient would go to the copy.
    """
    elsewhere = [entry for entry in _entries(model) if not _lies_on(entry[2], device)]
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


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device; from pinned memory the copy is queued like a kernel, and nothing waits for it."""
    return tensor.detach().to(device, non_blocking=True)


def _entries(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return every place in which a module holds a parameter or a buffer."""
    return [
        (table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _lies_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
