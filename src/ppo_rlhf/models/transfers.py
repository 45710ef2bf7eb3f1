"""Tensors on their way to a device and back: many in one copy, since each copy costs as much as a small kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def to_device(items: Sequence[Item], device: torch.device) -> list[Item]:
    """Return dataclasses of tensors, which are on the CPU, on a device: one copy for each type of numbers.

    Dataclasses may hold others; fields that are no tensors stay.
    """
    if device.type == "cpu":
        return list(items)
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for item in items:
        _map_tensors(item, collect)
    moved = iter(_copied(tensors, device))
    return [_map_tensors(item, lambda _: next(moved)) for item in items]


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of a device on the CPU: one copy, and one wait, for each type of numbers."""
    return _copied(tensors, torch.device("cpu"))


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    copied: dict[int, Tensor] = {}
    for dtype in {tensor.dtype: None for tensor in tensors}:  # in one order in all processes
        numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[number].flatten() for number in numbers]).to(device)
        parts = flat.split([tensors[number].numel() for number in numbers])
        copied.update({n: part.view(tensors[n].shape) for n, part in zip(numbers, parts, strict=True)})
    return [copied[number] for number in range(len(tensors))]


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _map_tensors(getattr(value, field.name), change) for field in fields(value)})
