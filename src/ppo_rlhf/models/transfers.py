"""Tensors on their way to a device and back: many in one copy, since each copy costs as much as a small kernel."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def to_device(items: Sequence[Item], device: torch.device) -> list[Item]:
    """Return dataclasses of tensors, which are on the CPU, on a device: one copy for each type of numbers.

    Dataclasses may hold others; fields that are no tensors stay as they are.
    """
    if device.type == "cpu":
        return list(items)
    tensors = [tensor for item in items for tensor in tensors_of(item)]
    moved = zip(map(id, tensors), _copied(tensors, device), strict=True)
    return copy.deepcopy(list(items), dict(moved))


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


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataclass, field by field, those of dataclasses in it among them."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
