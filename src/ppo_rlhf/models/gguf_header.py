"""Reads the keys and the list of tensors of a GGUF file, whose every count is compared with the file's size first."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ppo_rlhf.models.directories import MAGIC

VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_AXES = 4
_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The letters, for `struct` and NumPy, of GGUF's types of numbers."""
_LEAST_KEY, _LEAST_TENSOR, _LEAST_TEXT = 13, 24, 8
"""The bytes that a key with its value, a tensor's entry, and a text take at least."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a GGUF file."""

    shape: tuple[int, ...]  # as torch counts axes: the last axis is contiguous
    type: str  # name of the type of the numbers, such as Q4_1
    start: int  # first byte in the file
    size: int  # bytes


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself: the values of its keys, and its tensors by name."""

    values: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(file: BinaryIO) -> GGUFHeader:
    """Read the header of a GGUF file.

    The reader takes memory in proportion to the file's size, whatever the file announces.

    Raises:
        ValueError: The file is damaged, or of another version.
    """
    source = _Source(file)
    if source.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := source.number("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}, not {' or '.join(map(str, VERSIONS))}")
    tensors, keys = source.count(_LEAST_TENSOR), source.count(_LEAST_KEY)
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = source.text()
        if key in values:
            raise ValueError(f"the key {key} stands twice in it")
        values[key] = source.value(source.number("I"))
    entries = [source.tensor() for _ in range(tensors)]
    alignment = values.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{ALIGNMENT}={alignment}")
    return GGUFHeader(values, dict(_placed(entries, -(-source.position // alignment) * alignment, source.size)))


class _Source:
    """A file that is read from its begin, and never beyond its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.position = file, 0
        self.size = os.fstat(file.fileno()).st_size
        file.seek(0)

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes."""
        if n > self.size - self.position or len(content := self._file.read(n)) < n:
            raise ValueError(f"it announces {n:,} bytes at byte {self.position:,} of {self.size:,}")
        self.position += n
        return content

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def count(self, least: int) -> int:
        """Return the next count, of things that take at least `least` bytes each."""
        n: int = self.number("Q")
        if n * least > self.size - self.position:
            raise ValueError(f"it announces {n:,} entries at byte {self.position:,} of {self.size:,}")
        return n

    def text(self) -> str:
        return self.take(self.count(1)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        kind = self.number("I")
        if kind == _TEXT:
            return [self.text() for _ in range(self.count(_LEAST_TEXT))]
        if kind not in _NUMBERS:
            raise ValueError(f"an array has the type {kind}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the next tensor's name, shape, type, and place after the header."""
        name, axes = self.text(), self.number("I")
        if axes > MAX_AXES:
            raise ValueError(f"the tensor {name} has {axes} axes")
        shape = tuple(self.number("Q") for _ in range(axes))
        return name, shape[::-1], self.number("I"), self.number("Q")


def _placed(
    entries: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the names and places of tensors that begin at the byte `start` of a file; no two may share a byte."""
    import gguf  # imported inside the function, because the package is an extra

    end, names = start, set[str]()
    for name, shape, number, offset in sorted(entries, key=lambda entry: entry[-1]):
        kind = gguf.GGMLQuantizationType(number)
        block, of_block = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"the tensor {name} of the type {kind.name} has the shape {shape}")
        stored = StoredTensor(shape, kind.name, start + offset, math.prod(shape) // block * of_block)
        if stored.start < end or (end := stored.start + stored.size) > size:
            raise ValueError(f"the tensor {name} lies outside the file or in another tensor")
        if name in names:
            raise ValueError(f"the tensor {name} stands twice in it")
        names.add(name)
        yield name, stored
