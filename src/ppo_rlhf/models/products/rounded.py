"""Products of 16-bit matrices on a CPU without fast instructions for them: in float32, of the rounded numbers.

Torch multiplies them without a library where there are none, in 4 to 7 times the time, and 14 to 85 times with the
backward pass; by slow ones, in twice the time.
Widening changes no number, sums are float32's and the result is rounded once, as by processors with instructions.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor, nn

from ppo_rlhf.models.products.processors import lacks_fast_instructions

PIECE = 2**21
"""Numbers of a factor or a result that are in float32 at a time, 8 MiB: with half as much it takes 3 to 10 % longer."""
NARROWEST = 128
"""Rows or columns of a piece, however long they are (a vocabulary's, say): each meets the whole of the other factor."""
FEWEST_ROWS = 8
"""Of a product. With fewer, widening the weight takes longer than torch does without (4 rows: 2.6 against 0.4 ms)."""
LARGEST_KEPT = 2 * PIECE
"""Numbers of memory that is kept."""


def rounded_type(rows: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the type in which a linear layer on the CPU computes, if it is one without fast instructions.

    It is autocast's, or else that of both. None also where there are few rows.
    """
    if rows.numel() < FEWEST_ROWS * rows.shape[-1]:
        return None
    if torch.is_autocast_enabled("cpu") and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
    elif rows.dtype == weight.dtype:
        dtype = rows.dtype
    else:
        return None
    return dtype if lacks_fast_instructions(dtype) else None


def rounded_times_transposed(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[m, n]` = left `[m, k]` right^T `[k, n]` + bias `[n]`, all in one type of 16 bits, of any strides."""
    result = left.new_empty(len(left), len(right))
    width = max(NARROWEST, PIECE // max(1, right.shape[1]))
    for start in range(0, len(right), width):
        block = slice(start, start + width)
        factor = _widened("right", right[block]).t()
        height = max(NARROWEST, PIECE // max(factor.shape))
        for some, into in zip(left.split(height), result[:, block].split(height), strict=True):
            wide = _room("result", into)  # autocast leaves alone what has its result given
            if bias is None:
                torch.mm(_widened("left", some), factor, out=wide)
            else:
                torch.addmm(bias[block].float(), _widened("left", some), factor, out=wide)
            into.copy_(wide)
    return result


def _widened(name: str, matrix: Tensor) -> Tensor:
    """Return a matrix in float32, as it lies in memory."""
    if matrix.stride(0) < matrix.stride(1):
        return _widened(name, matrix.t()).t()
    return _room(name, matrix).copy_(matrix)


def _room(name: str, matrix: Tensor) -> Tensor:
    """Return memory for a matrix of this shape in float32, until the same is asked for again."""
    size = math.prod(matrix.shape)
    if size > LARGEST_KEPT or type(matrix) not in (Tensor, nn.Parameter):
        return matrix.new_empty(matrix.shape, dtype=torch.float32)  # also of tensors without data, which are counted
    if name not in _rooms.held or len(_rooms.held[name]) < size:
        with torch.inference_mode(False):  # it will be written to outside, too
            _rooms.held[name] = torch.empty(size, dtype=torch.float32, device="cpu")
    return _rooms.held[name][:size].view(matrix.shape)


class _Rooms(threading.local):
    """Memory that each thread keeps: blocks that come and go between those of a graph would leave holes in the heap."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}


_rooms = _Rooms()
