"""Read CSV files as one table without loss: the types of a column come from the cells of all files."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pandas as pd
import pyarrow as pa

from ppo_rlhf.core.errors import DataError, in_one_line

# Imported here only for type checkers: `datasets` takes two seconds to import, so functions that use it import it
if TYPE_CHECKING:
    from datasets import Dataset

_TEXT_COLUMNS = ("prompt", "completion", "text", "chosen", "rejected")
_SURPLUS = "Rows have more cells than the header; quote texts that contain commas."
_EXACT = 2**53  # a float is exact for whole numbers up to this one


def read_csv(files: Sequence[Path], text_column: str) -> Dataset:
    """Return the table of CSV files, in memory.

    Only an empty cell is a missing value, and a column of whole numbers with a missing value keeps whole numbers. A
    column is read as text if its types differ between the files, or if floats would change its whole numbers.
    """
    import datasets
    from datasets.table import InMemoryTable

    texts = {*_TEXT_COLUMNS, text_column}
    frames = [_read_frame(file, texts) for file in files]
    if mixed := _mixed(files, frames):
        frames = [_read_frame(file, texts | mixed) for file in files]
    tables = [pa.Table.from_pandas(_typed(frame), preserve_index=False) for frame in frames]
    schemas = [table.schema.remove_metadata() for table in tables]
    joint = pa.unify_schemas(schemas, promote_options="permissive")
    whole = pa.concat_tables([table.replace_schema_metadata() for table in tables], promote_options="permissive")
    return datasets.Dataset(InMemoryTable(whole.cast(joint)))


def decoded(file: Path) -> str:
    """Return the text of a file, compressed or not.

    Raises:
        DataError: The file is damaged or is not UTF-8; the error names the line.
    """
    try:
        with fsspec.filesystem("file").open(str(file), "rb", compression="infer") as opened:
            content = opened.read()
    except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{file}: this data file is damaged: {in_one_line(error)}") from error
    try:
        return str(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(f"{file}: line {number} is damaged: it is not UTF-8 text.") from error


def _read_frame(file: Path, texts: set[str]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(
            file,
            encoding="utf-8-sig",
            dtype=dict.fromkeys(texts, "string"),
            dtype_backend="numpy_nullable",
            keep_default_na=False,
            na_values=[""],
        )
    # pandas' ParserError is a ValueError, and its message names the line
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, UnicodeDecodeError):
            decoded(file)  # raises an error that names the undecodable line
        reason = in_one_line(error)
        raise DataError(
            f"{file}: this CSV file is damaged: {reason}{f'. {_SURPLUS}' if 'saw' in reason else ''}"
        ) from error
    # If the rows have more cells than the header, pandas takes the first cells as row labels
    if not isinstance(frame.index, pd.RangeIndex):
        raise DataError(f"{file}: this CSV file is damaged: {_SURPLUS}")
    # pandas would call the second of two columns `a` `a.1`
    header = pd.read_csv(file, encoding="utf-8-sig", header=None, nrows=1, dtype="string").iloc[0].dropna()
    if header.duplicated().any():
        raise DataError(f"{file}: the header has the column `{header[header.duplicated()].iloc[0]}` twice. Rename one.")
    return frame


def _mixed(files: Sequence[Path], frames: Sequence[pd.DataFrame]) -> set[str]:
    """Return the columns whose cells only text can hold without loss."""
    mixed = set()
    for name in dict.fromkeys(name for frame in frames for name in frame.columns):
        columns = [frame[name] for frame in frames if name in frame and frame[name].notna().any()]
        kinds = {str(column.dtype) for column in columns}
        if kinds <= {"Int64", "Float64"}:
            is_lossy = "Float64" in kinds and any(column.abs().max() >= _EXACT for column in columns)
            if is_lossy and any(_has_long_whole(file, name) for file in files):
                mixed.add(name)
        elif len(kinds) > 1:
            mixed.add(name)
    return mixed


def _has_long_whole(file: Path, name: str) -> bool:
    """Return whether a column has a whole number that a float cannot hold."""
    cells = _read_frame(file, {name}).get(name, pd.Series(dtype="string")).dropna().str.strip()
    return any(int(cell) != int(float(cell)) for cell in cells[cells.str.fullmatch(r"[+-]?\d+")])


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose columns without any value have no type, so that they fit the columns of other files."""
    empty = {name: None for name in frame.columns if frame[name].isna().all()}
    return frame.assign(**empty) if empty else frame
