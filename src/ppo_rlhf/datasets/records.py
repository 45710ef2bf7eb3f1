"""A catalog entry for a table that a person gives: JSON Lines, JSON, CSV, Parquet or text, checked line by line."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
from kedro.io import AbstractDataset, DatasetError
from kedro_datasets._typing import TablePreview

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.tables import table_of_columns, table_of_rows
from ppo_rlhf.datasets.paths import expand_home
from ppo_rlhf.datasets.tables import table_preview

_PREVIEW_ROWS = 5
_KINDS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_TEXT_COLUMNS = ("prompt", "completion", "text", "chosen", "rejected")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # fits into 64 bits; with a zero in front it is a code, not a number
_NUMBER = re.compile(_INTEGER.pattern + r"(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_TRUTHS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_SURPLUS_CELLS = "Rows have more cells than the header; quote texts that hold commas."


class RecordsDataset(AbstractDataset[pd.DataFrame, pd.DataFrame | None]):
    """A table read by its file's ending; None where no file was named (an optional input).

    JSON Lines has one object a line, JSON a list of objects, plain text one row a line. In CSV, only an empty cell is
    missing. A column of nothing but numbers, or but true and false, is read as these, unless one has zeros in front
    (007) or the column is called prompt, completion, text, chosen, rejected, or as `text_column` says. Example:

    ```yaml
    raw_prompts:
      type: ppo_rlhf.datasets.RecordsDataset
      filepath: data/01_raw/prompts.jsonl
      text_column: prompt
    ```
    """

    def __init__(self, filepath: str | None, text_column: str = "text", metadata: dict[str, Any] | None = None) -> None:
        """Describe where the table is; nothing is read.

        Args:
            filepath: The file, or None.
            text_column: The column's name where the file is plain text (.txt); in CSV a column that stays text.
            metadata: Read by Kedro-Viz.
        """
        self._path = None if filepath is None else Path(expand_home(filepath))
        self._text_column = text_column
        self.metadata = metadata

    def load(self) -> pd.DataFrame | None:
        """Return the table, None without a file.

        Raises:
            DataError: No such file, an unknown ending, a damaged line (its number is named), or no rows (seen by
                Kedro's callers as the cause of a `DatasetError`).
        """
        return None if self._path is None else read_records(self._path, self._text_column)

    def save(self, data: pd.DataFrame) -> None:
        """Refuse: what a person gives is never written."""
        raise DatasetError(f"{self._path} is an input of a person's own, which is never written.")

    def preview(self) -> TablePreview:
        """Show Kedro-Viz the first rows."""
        if self._path is None or not self._path.is_file():
            return TablePreview({"index": [], "columns": [], "data": []})
        return table_preview(read_records(self._path, self._text_column).head(_PREVIEW_ROWS))

    def _exists(self) -> bool:
        return self._path is not None and self._path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": None if self._path is None else str(self._path)}


def read_records(path: Path, text_column: str = "text") -> pd.DataFrame:
    """Return the table in `path`; raise `DataError`, one line, where it cannot be read or has no rows."""
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"{path}: this data file {what}. Give one of {', '.join(_KINDS)}.")
    kind = path.suffix.lower()
    if kind not in _KINDS:
        raise DataError(f"{path}: files ending in {kind or 'nothing'} cannot be read. Give one of {', '.join(_KINDS)}.")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: this data file is empty. It needs at least one row.")
    frame = _READERS[kind](path, text_column)
    if frame.empty:
        raise DataError(f"{path}: this data file has no rows. It needs at least one.")
    return frame


def _read_json_lines(path: Path, _: str) -> pd.DataFrame:
    records = []
    for number, line in enumerate(_text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: line {number} is damaged, it is not valid JSON ({error.msg}).") from error
        if not _is_unicode(line, record):
            raise DataError(f"{path}: line {number} is damaged, it has half of a surrogate pair (\\ud800 to \\udfff).")
        if not isinstance(record, dict):
            hint = " A list of objects is a .json file." if isinstance(record, list) else ""
            raise DataError(f"{path}: line {number} is not an object with named columns: {line.strip()[:40]}{hint}")
        records.append(record)
    return table_of_rows(records)


def _is_unicode(line: str, value: Any) -> bool:
    """Whether what a line of JSON says can be written as text: an escape may stand for half of a character."""
    if "\\ud" not in line.lower():
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_json(path: Path, _: str) -> pd.DataFrame:
    try:
        records = json.loads("\n".join(_text_lines(path)))
    except json.JSONDecodeError as error:
        hint = " One object a line is a .jsonl file: rename it." if error.msg == "Extra data" else ""
        raise DataError(f"{path}: line {error.lineno} is damaged, it is not valid JSON ({error.msg}).{hint}") from error
    if not _is_unicode("\\ud", records):
        raise DataError(f"{path}: this file is damaged, it has half of a surrogate pair (\\ud800 to \\udfff).")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: a .json file must hold a list of objects with named columns.")
    return table_of_rows(records)


def _read_csv(path: Path, text_column: str) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, encoding="utf-8-sig", dtype="string", keep_default_na=False, na_values=[""])
    except (ValueError, UnicodeDecodeError) as error:  # pandas' parser errors are ValueErrors and name the line
        reason = " ".join(str(error).split())
        hint = f". {_SURPLUS_CELLS}" if re.search(r"Expected \d+ fields in line \d+, saw", reason) else ""
        raise DataError(f"{path}: this CSV file is damaged: {reason}{hint}") from error
    if not isinstance(frame.index, pd.RangeIndex):  # pandas took the first cells for row labels and shifted the others
        raise DataError(f"{path}: this CSV file is damaged: {_SURPLUS_CELLS}")
    columns: dict[str, list[Any]] = {}
    for name in map(str, frame):
        cells = [None if cell is pd.NA else cell for cell in frame[name].tolist()]
        columns[name] = cells if name in (*_TEXT_COLUMNS, text_column) else _values(cells)
    return table_of_columns(columns)


def _values(cells: list[str | None]) -> list[Any]:
    """Return a column of CSV as truths, whole numbers or numbers if all its cells are, else as it stands."""
    given = [cell.strip(" ") for cell in cells if cell is not None]
    convert: Callable[[str], Any]
    if all(cell in _TRUTHS for cell in given):
        convert = _TRUTHS.__getitem__
    elif all(_INTEGER.fullmatch(cell) for cell in given):
        convert = int
    elif all(_NUMBER.fullmatch(cell) and math.isfinite(float(cell)) for cell in given):
        convert = float
    else:
        return cells
    return [None if cell is None else convert(cell.strip(" ")) for cell in cells]


def _read_parquet(path: Path, _: str) -> pd.DataFrame:
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()  # pandas would give nested lists as arrays
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path}: this Parquet file is damaged: {' '.join(str(error).split())}") from error
    return table_of_rows(rows)


def _read_text(path: Path, text_column: str) -> pd.DataFrame:
    return pd.DataFrame({text_column: [line for line in _text_lines(path) if line.strip()]})


def _text_lines(path: Path) -> list[str]:
    """Return the file's lines without their ends; the byte-order mark that Windows editors write is dropped."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}: line {number} is damaged, it is not UTF-8 text.") from error
    return text.replace("\r\n", "\n").split("\n")


_READERS = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
