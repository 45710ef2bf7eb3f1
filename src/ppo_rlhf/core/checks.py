"""Checks of the arguments of numeric functions: shapes, ranges, and the float type to compute in."""

import math
from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor, nn

from ppo_rlhf.core.errors import ConfigError, ShapeError


def check_shape(where: str, dimensions: str | None, **tensors: Tensor) -> None:
    """Raise ShapeError unless all tensors have the same shape, with one axis per letter of `dimensions` (such as "BT").

    With `dimensions` None any number of axes is allowed. The error message begins with `where`, the caller's name.
    """
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    name, first = next(iter(shapes.items()))
    if dimensions is not None and len(first) != len(dimensions):
        raise ShapeError(f"{where}: {name} has shape {first}; it must be [{', '.join(dimensions)}].")
    if any(shape != first for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"{where}: got {listed}; all must have the same shape. Cut or pad them to one shape first.")


def check_one_per_row(where: str, rows: int, **tensors: Tensor) -> None:
    """Raise ShapeError unless each tensor has the shape [`rows`]."""
    for name, tensor in tensors.items():
        if list(tensor.shape) != [rows]:
            raise ShapeError(
                f"{where}: {name} has shape {list(tensor.shape)}; it must be [{rows}]. Give one number per row."
            )


def check_prefix_mask(where: str, mask: Tensor) -> None:
    """Raise ShapeError unless every row of the bool `mask` [B, T] is True on a (possibly empty) prefix only."""
    rises_B = (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)
    if bool(rises_B.any()):
        row = int(rises_B.nonzero()[0])
        raise ShapeError(
            f"{where}: row {row} of mask is True after a False; responses must be right-padded without holes. "
            "Build the mask with length_mask(lengths, width)."
        )


def check_range(
    where: str,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    **values: float,
) -> None:
    """Raise ConfigError unless each value is finite, >= `at_least`, > `above`, <= `at_most` and < `below`."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= at_least and value > above and value <= at_most and value < below):
            bounds = [
                f"{sign} {bound:g}"
                for sign, bound in ((">=", at_least), (">", above), ("<=", at_most), ("<", below))
                if math.isfinite(bound)
            ]
            rule = " and ".join(["finite", *bounds])
            raise ConfigError(f"{where}: {name}={value!r}; it must be {rule}. Change {name}.")


def check_choice(where: str, choices: Collection[str], **values: str) -> None:
    """Raise ConfigError unless each value is one of `choices`."""
    for name, value in values.items():
        if value not in choices:
            raise ConfigError(f"{where}: {name}={value!r} is unknown. Choose one of: {', '.join(choices)}.")


def as_bool(mask: Tensor) -> Tensor:
    """Convert a 0/1 mask of any type to bool; return a bool mask unchanged."""
    return mask if mask.dtype == torch.bool else mask != 0


def compute_dtype(*given: Tensor | nn.Module) -> torch.dtype:
    """Return float64 if a tensor or model is float64, otherwise float32: half precision and integers are widened."""
    return torch.float64 if any(each.dtype == torch.float64 for each in given) else torch.float32


def select(x: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype` where the bool `mask` is True, and 0 elsewhere, even if `x` is NaN there.

    Entries where `mask` is False get gradient 0.
    """
    return torch.where(mask, x.to(dtype), _zero(x.device, dtype))


@cache
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a cached zero tensor, because `torch.where` would make a new tensor from a Python number at each call."""
    with torch.inference_mode(False):
        return torch.zeros((), device=device, dtype=dtype)
