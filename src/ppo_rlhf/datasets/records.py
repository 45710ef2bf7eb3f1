"""A catalog entry for a table that a user gives: JSON Lines, JSON, CSV, Parquet or text, checked line by line."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
from kedro.io import AbstractDataset, DatasetError
from kedro_datasets._typing import TablePreview

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.data.tables import table_of_columns, table_of_rows
from ppo_rlhf.datasets.hub import HUB, local_file
from ppo_rlhf.datasets.tables import table_preview
from ppo_rlhf.paths import expand_home
from ppo_rlhf.rewards.functions import load_function

_PREVIEW_ROWS = 5
_KINDS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_TEXT_COLUMNS = ("prompt", "completion", "text", "chosen", "rejected")


class RecordsDataset(AbstractDataset[pd.DataFrame, pd.DataFrame | None]):
    """A table read by its file's ending; None where no file was named (an optional input).

    JSON Lines has one object a line, JSON a list of objects, plain text one row a line. In CSV, only an empty cell is
    missing. A column of nothing but numbers, or but true and false, is read as these (007 as 7), unless it is called
    prompt, completion, text, chosen, rejected, or as `text_column` says. A file on the Hugging Face hub is named
    `hf://datasets/<owner>/<name>/<file>` and downloaded once. Example:

    ```yaml
    raw_prompts:
      type: ppo_rlhf.datasets.RecordsDataset
      filepath: data/01_raw/prompts.jsonl
      text_column: prompt
    ```
    """

    def __init__(
        self,
        filepath: str | None,
        text_column: str = "text",
        prepare: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Describe where the table is; nothing is read.

        Args:
            filepath: The file, on this machine or on the hub, or None.
            text_column: The column's name where the file is plain text (.txt); in CSV a column that stays text.
            prepare: `module:name` of a function that makes the table that is wanted of the one in the file, a
                DataFrame of a DataFrame; the module is found as a reward function's is.
            metadata: Read by Kedro-Viz.
        """
        is_on_hub = str(filepath).startswith(HUB)
        self._source = filepath if filepath is None or is_on_hub else str(Path(expand_home(filepath)))
        self._path = None if self._source is None or is_on_hub else Path(self._source)
        self._text_column, self._prepare = text_column, prepare
        self.metadata = metadata

    def load(self) -> pd.DataFrame | None:
        """Return the table, None without a file.

        Raises:
            DataError: No such file, an unknown ending, a damaged line (its number is named), no rows, or `prepare`
                failed (seen by Kedro's callers as the cause of a `DatasetError`).
        """
        if self._source is None:
            return None
        frame = read_records(local_file(self._source), self._text_column)
        return frame if self._prepare is None else _prepared(frame, self._prepare, self._source)

    def save(self, data: pd.DataFrame) -> None:
        """Refuse: a user's input is never written."""
        raise DatasetError(f"{self._source} is the user's own input, which is never written.")

    def preview(self) -> TablePreview:
        """Show Kedro-Viz the first rows."""
        if self._path is None or not self._path.is_file():
            return TablePreview({"index": [], "columns": [], "data": []})
        return table_preview(read_records(self._path, self._text_column).head(_PREVIEW_ROWS))

    def _exists(self) -> bool:
        return self._path is not None and self._path.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._source}


def _prepared(frame: pd.DataFrame, prepare: str, source: str) -> pd.DataFrame:
    function: Any = load_function(prepare)
    try:
        made = function(frame)
    except Exception as error:  # a user's function can raise anything
        raise DataError(f"{source}: {prepare} raised {type(error).__name__}: {in_one_line(error)}") from error
    if not isinstance(made, pd.DataFrame) or made.empty:
        what = "no rows" if isinstance(made, pd.DataFrame) else f"a value of type {type(made).__name__}"
        raise DataError(f"{source}: {prepare} returned {what}. Return a DataFrame with rows.")
    return made


def read_records(path: Path, text_column: str = "text") -> pd.DataFrame:
    """Return the table in `path`; raise `DataError`, one line, where it cannot be read or has no rows."""
    kind = path.suffix.lower()
    if not path.is_file():
        problem = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"{path}: this data file {problem}. Give one of {', '.join(_KINDS)}.")
    if kind not in _KINDS:
        raise DataError(f"{path}: files ending in {kind or 'nothing'} cannot be read. Give one of {', '.join(_KINDS)}.")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: this data file is empty. It needs at least one row.")
    if kind == ".jsonl":
        frame = table_of_rows([_object(path, number, line) for number, line in _lines(path)])
    elif kind == ".json":
        frame = table_of_rows(_objects(path))
    elif kind == ".csv":
        frame = _read_csv(path, text_column)
    elif kind == ".parquet":
        frame = _read_parquet(path)
    else:
        frame = pd.DataFrame({text_column: [line for _, line in _lines(path)]})
    if frame.empty:
        raise DataError(f"{path}: this data file has no rows. It needs at least one.")
    return frame


def _text(path: Path) -> str:
    """Return the file's text; the byte-order mark that Windows' editors write is dropped."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}: line {number} is damaged, it is not UTF-8 text.") from error


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    return [(number, line) for number, line in enumerate(_text(path).split("\n"), start=1) if line.strip()]


def _parsed(path: Path, number: int, text: str) -> Any:
    """Return the value of JSON text that begins in line `number` of a file."""
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escape may be half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        is_lines = error.msg == "Extra data" and path.suffix == ".json"
        hint = " One object a line is a .jsonl file: rename it." if is_lines else ""
        line = number + error.lineno - 1
        raise DataError(f"{path}: line {line} is damaged, it is not valid JSON ({error.msg}).{hint}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: line {number} is damaged, it has half of a surrogate pair.") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise DataError(f"{path}: line {number} cannot be read: {error}.") from error
    return value


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    value = _parsed(path, number, line)
    if not isinstance(value, dict):
        hint = " A list of objects is a .json file." if isinstance(value, list) else ""
        raise DataError(f"{path}: line {number} is not an object with named columns: {line.strip()[:40]}{hint}")
    return value


def _objects(path: Path) -> list[dict[str, Any]]:
    rows = _parsed(path, 1, _text(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: a .json file must hold a list of objects with named columns.")
    return rows


def _read_csv(path: Path, text_column: str) -> pd.DataFrame:
    surplus = "Rows have more cells than the header; quote texts that hold commas."
    try:
        frame = pd.read_csv(
            path,
            encoding="utf-8-sig",
            dtype=dict.fromkeys((*_TEXT_COLUMNS, text_column), "string"),
            dtype_backend="numpy_nullable",  # whole numbers stay whole where a cell is empty
            keep_default_na=False,
            na_values=[""],
        )
    except ValueError as error:  # also a UnicodeDecodeError and pandas' parser errors, which name the line
        reason = in_one_line(error)
        raise DataError(
            f"{path}: this CSV file is damaged: {reason}{f'. {surplus}' if 'saw' in reason else ''}"
        ) from error
    if not isinstance(frame.index, pd.RangeIndex):  # pandas took the first cells for row labels and shifted the others
        raise DataError(f"{path}: this CSV file is damaged: {surplus}")
    return table_of_columns(
        {str(name): [None if cell is pd.NA else cell for cell in frame[name].tolist()] for name in frame}
    )


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return table_of_rows(pyarrow.parquet.read_table(path).to_pylist())  # pandas would give nested lists as arrays
    except OverflowError as error:
        raise DataError(f"{path}: a time is outside the years 1 to 9999, or too long a duration: {error}.") from error
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path}: this Parquet file is damaged: {in_one_line(error)}") from error
