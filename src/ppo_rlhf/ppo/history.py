"""The metrics of every iteration, kept small: a run of 100,000 iterations holds tens of megabytes, not hundreds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

Row = dict[str, float]


class MetricHistory(Sequence[Row]):
    """Rows of metrics by iteration, stored by column; a row may lack metrics that others have."""

    def __init__(self, rows: Sequence[Mapping[str, float]] = ()) -> None:
        """Start with these rows."""
        self._values: dict[str, array[float]] = {}
        self._present: dict[str, bytearray] = {}
        self._length = 0
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row at the end."""
        for name in row:
            if name not in self._values:
                self._values[name] = array("d", [0.0]) * self._length
                self._present[name] = bytearray(self._length)
        for name, column in self._values.items():
            column.append(float(row.get(name, 0.0)))
            self._present[name].append(name in row)
        self._length += 1

    @property
    def names(self) -> list[str]:
        """The metrics that any row has, in the order of their first appearance."""
        return list(self._values)

    def tensors(self) -> dict[str, Tensor]:
        """Return `values`, float64, and `is_present`, bool, both `[rows, names]`."""
        shape = (len(self.names), self._length)
        values, present = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        for index, name in enumerate(self.names if self._length else ()):
            values[index] = torch.frombuffer(self._values[name], dtype=torch.float64)
            present[index] = torch.frombuffer(self._present[name], dtype=torch.bool)
        return {"values": values.T.contiguous(), "is_present": present.T.contiguous()}

    @classmethod
    def from_tensors(cls, names: Sequence[str], tensors: Mapping[str, Tensor]) -> MetricHistory:
        """Rebuild a history from what `names` and `tensors()` gave."""
        rows = zip(tensors["values"].tolist(), tensors["is_present"].tolist(), strict=True)
        return cls(
            [
                {name: value for name, value, there in zip(names, values, present, strict=True) if there}
                for values, present in rows
            ]
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows, oldest first."""
        return (self[index] for index in range(self._length))

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Return a row, or a list of rows."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        position = range(self._length)[index]
        return {name: column[position] for name, column in self._values.items() if self._present[name][position]}

    def __eq__(self, other: Any) -> bool:
        """Compare row by row, with a list of rows too."""
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
