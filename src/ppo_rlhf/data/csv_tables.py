"""Read CSV files as one table without loss: each cell comes back as it stands, or the file is refused in one line."""

from __future__ import annotations

import csv
import lzma
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec
import pyarrow as pa

from ppo_rlhf.core.errors import DataError, in_one_line

# Imported here only for type checkers: `datasets` takes two seconds to import, so functions that use it import it
if TYPE_CHECKING:
    from datasets import Dataset

_TEXT_COLUMNS = ("prompt", "completion", "text", "chosen", "rejected")
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_SEP_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # Excel's hint of the delimiter, before the header
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read_csv(files: Sequence[Path], text_column: str) -> Dataset:
    """Return the table of CSV files, in memory.

    Only an empty cell is a missing value. A column has a type other than text only if each of its values, printed by
    Python, is the cell as it stands: `007`, `1.10`, `+5` and `true` stay texts. The cells of all files decide together.

    Raises:
        DataError: A file is damaged, or a row has not as many cells as the header.
    """
    import datasets
    from datasets.table import InMemoryTable

    columns: dict[str, list[str | None]] = {}
    length = 0
    for file in files:
        header, *rows = _read(file)
        for name in header:
            columns.setdefault(name, [None] * length)
        length += len(rows)
        cells = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else {}
        for name, column in columns.items():
            column += [cell or None for cell in cells[name]] if name in cells else [None] * (length - len(column))
    texts = {*_TEXT_COLUMNS, text_column}
    table = {name: _typed(name, column, files[0], is_text=name in texts) for name, column in columns.items()}
    return datasets.Dataset(InMemoryTable(pa.table(table)))


def decoded(file: Path) -> str:
    """Return the text of a file, compressed or not.

    Raises:
        DataError: The file is damaged or is not UTF-8; the error names the line.
    """
    try:
        with fsspec.filesystem("file").open(str(file), "rb", compression="infer") as opened:
            content = opened.read()
    except (*_DAMAGE, ValueError) as error:
        raise DataError(f"{file}: this data file is damaged: {in_one_line(error)}") from error
    try:
        return str(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(f"{file}: line {number} is damaged: it is not UTF-8 text.") from error


# --- the cells of a file


class _Row(NamedTuple):
    line: int  # number of the row's first line in the file
    cells: list[str]
    raw: str  # the row as it stands in the file


def _read(file: Path) -> list[list[str]]:
    """Return the header and the rows of a file, each row with as many cells as the header."""
    try:
        with (
            fsspec.filesystem("file").open(str(file), "rb", compression="infer") as opened,
            TextIOWrapper(opened, encoding="utf-8-sig", newline="") as text,
        ):
            return list(_checked(file, text))
    except UnicodeDecodeError:
        decoded(file)  # raises an error that names the undecodable line
        raise
    except _DAMAGE as error:
        raise DataError(f"{file}: this CSV file is damaged: {in_one_line(error)}") from error


def _checked(file: Path, text: Iterable[str]) -> Iterator[list[str]]:
    lines, number = iter(text), 1
    while (first := next(lines, "")) and not first.strip():
        number += 1
    if hint := _SEP_LINE.fullmatch(first):
        first, number, delimiter = next(lines, ""), number + 1, hint[1]
    else:
        delimiter = _delimiter(file, first)
    rows = _rows(file, number, first, lines, delimiter)
    header = next(rows, _Row(number, [], "")).cells
    # pandas writes the column of row labels without a name, and reads it by this name
    names = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{file}: the header has the column `{twice}` twice. Rename one.")
    yield names
    for row in rows:
        if len(row.cells) != len(names):
            if len(row.cells) == 1 and not row.cells[0].strip():
                continue  # a blank line
            many = "more" if len(row.cells) > len(names) else "fewer"
            found = f"it has {many} cells than the header, {len(row.cells)} instead of {len(names)}"
            mark = _DELIMITERS.get(delimiter, delimiter)
            raise _damage(file, row, found, delimiter, f"Quote texts that contain {mark} or line breaks.")
        yield row.cells


def _delimiter(file: Path, header: str) -> str:
    """Return the delimiter that cuts the header into names; a header of one column has none, which reads as commas."""
    cuts = [mark for mark in _DELIMITERS if mark in re.sub(r'"[^"]*"', "", header)]
    if len(cuts) > 1:
        seen = " and ".join(_DELIMITERS[mark] for mark in cuts)
        raise DataError(f"{file}: the header has {seen} outside of quotes. Quote names that contain one of them.")
    return cuts[0] if cuts else ","


def _rows(file: Path, number: int, first: str, lines: Iterator[str], delimiter: str) -> Iterator[_Row]:
    """Yield the rows of a file from its line `first`, the line `number`, on."""
    csv.field_size_limit(sys.maxsize)  # the default refuses cells of more than 128 KiB
    raw: list[str] = []

    def noted() -> Iterator[str]:
        for line in (line for part in ([first], lines) for line in part):
            raw.append(line)
            yield line

    reader, begin = csv.reader(noted(), delimiter=delimiter, strict=True), number
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            is_open = "unexpected end" in str(error)
            found = "a quote opens here and never closes" if is_open else f"text follows a closing quote ({error})"
            row = _Row(begin, [], "".join(raw))
            raise _damage(file, row, found, delimiter, "Write a quote within a quoted text twice.") from error
        if cells:
            yield _Row(begin, cells, "".join(raw))
        raw.clear()
        begin = number + reader.line_num


def _damage(file: Path, row: _Row, found: str, delimiter: str, fix: str) -> DataError:
    if re.search(rf'\\["{re.escape(delimiter)}]', row.raw):
        fix = (
            "A backslash stands before a quote or delimiter, as Spark writes it: write a quote within a quoted text "
            """twice (in Spark: option("escape", '"')), and quote texts that contain a delimiter."""
        )
    return DataError(f"{file}: this CSV file is damaged: line {row.line}: {found}. {fix}")


# --- the type of a column


def _whole(cell: str) -> int:
    if not -(2**63) <= (value := int(cell)) < 2**63:
        raise ValueError("Arrow has no whole number of this size")
    return value


def _fraction(cell: str) -> float:
    if not math.isfinite(value := float(cell)):
        raise ValueError("not a number")
    return value


def _truth(cell: str) -> bool:
    return {"true": True, "false": False}[cell.lower()]


_TYPES: list[tuple[Callable[[str], Any], pa.DataType]] = [
    (_whole, pa.int64()),
    (_fraction, pa.float64()),
    (_truth, pa.bool_()),
]


def _typed(name: str, cells: list[str | None], file: Path, *, is_text: bool) -> pa.Array:
    """Return a column as the first type whose values all print as the cells stand, else as text."""
    given = [cell for cell in cells if cell is not None]
    if not given:
        return pa.nulls(len(cells))
    changed: tuple[str, Any] | None = None
    for read, kind in () if is_text else _TYPES:
        try:
            values = [read(cell) for cell in given]
        except (ValueError, KeyError):
            continue
        other = next((pair for pair in zip(given, values, strict=True) if str(pair[1]) != pair[0]), None)
        if other is None:
            return pa.array([None if cell is None else read(cell) for cell in cells], kind)
        changed = changed or other
    if changed is not None:
        from ppo_rlhf.runtime.log_lines import say_once  # imports transformers, which takes seconds

        cell, value = changed
        say_once(f"{file}: the column `{name}` is read as text: its cell {cell!r} would else become {value}.")
    return pa.array(cells, pa.string())
