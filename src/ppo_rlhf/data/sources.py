"""Find a user's table, load it with `datasets`, and report what is wrong with a file that cannot be loaded."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pandas as pd

from ppo_rlhf.core.errors import DataError, in_one_line

# Imported here only for type checkers: `datasets` takes two seconds to import, so functions that use it import it
if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Maps endings of files to the builder of `datasets` that reads the file."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
HUB = "hf://datasets/"
_ENDINGS = f"{', '.join(FORMATS)}, plain or as {', '.join(COMPRESSIONS)}"
_NO_ROWS = "this data file has no rows; a data file needs at least one row."
_HUB_NAME = re.compile(
    r"(?P<path>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?(#(?P<name>[\w.-]+))?(:(?P<split>.+))?"
)
_HUB_FILE = re.compile(HUB + r"(?P<repo_id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<filename>.+)")
LONG = 10_000
"""A progress bar is shown for tables with more rows than this."""
_LARGE = 10_000_000  # a progress bar is shown when reading more than this many bytes
_TEXT_COLUMNS = ("prompt", "completion", "text", "chosen", "rejected")


def load_table(
    source: str, *, text_column: str = "text", cache: str | None = None, load_args: dict[str, Any] | None = None
) -> Dataset:
    """Return a table. A table from a CSV file is in memory; a table of another format is memory-mapped.

    Args:
        source: Files or a dataset on the hub, written like the `filepath` of a `RecordsDataset` in the catalog.
        text_column: The name for the column of plain-text files; in CSV a column that is read as text.
        cache: The folder for the Arrow files of the table; None: the cache of `datasets`.
        load_args: Further arguments of `datasets.load_dataset`.

    Raises:
        DataError: The source does not exist or cannot be reached, its ending is unknown, a line is damaged (the error
            has the line number), a text is not UTF-8, or the table has no rows.
    """
    options = load_args or {}
    files = files_of(source)
    if files is None:
        table = _load_from_hub(source, cache, options)
    elif isinstance(files, Path):
        table = _load_saved(files, options.get("split"))
    else:
        table = _load_files(source, files, text_column, cache, options)
    if not len(table):
        raise DataError(f"{source}: {_NO_ROWS}")
    try:
        check_texts(table, source)
    except DataError:
        # Check each file separately, so that the error names the damaged file and its row
        for file in files if isinstance(files, list) else ():
            check_texts(_load_files(str(file), [file], text_column, cache, options), str(file))
        raise
    return table


def check_texts(table: Dataset, source: str) -> None:
    """Raise `DataError` with row and column if a text is not UTF-8.

    Without this check `datasets` would fail only when the row is read. Arrow checks a gigabyte in half a second, so the
    whole table is checked first, and single rows are read only if the table holds a damaged text.
    """
    for name in () if _is_valid(table) else table.column_names:
        column, rows = table.select_columns([name]), range(len(table))
        for size in (1_000, 1):
            damaged = next((row for row in rows[::size] if not _is_readable(column, slice(row, row + size))), None)
            if damaged is None:
                break
            rows = range(damaged, min(damaged + size, len(table)))
        else:
            raise DataError(
                f"{source}: row {rows[0]}, column `{name}`: the text is not UTF-8. Write the file as UTF-8, or remove "
                "the row."
            )


def _is_valid(table: Dataset) -> bool:
    import pyarrow as pa

    try:
        table.data.table.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_readable(column: Dataset, rows: slice) -> bool:
    try:
        column[rows]
    except UnicodeDecodeError:
        return False
    return True


def is_hub_name(source: str) -> bool:
    """Return whether a source that is not a file can be the name of a dataset on the hub.

    `folder/name` is no name on the hub if `folder` exists: a mistyped path must not be looked up on the hub.
    """
    match = _HUB_NAME.fullmatch(source)
    return (
        match is not None and _kind(Path(source)) not in FORMATS and not os.path.isdir(os.path.dirname(match["path"]))
    )


def files_of(source: str) -> list[Path] | Path | None:
    """Return the files that a source names, the folder that `save_to_disk` wrote, or None for a dataset on the hub."""
    if source.startswith(HUB):
        return [_downloaded(source)]
    path = Path(source).expanduser()
    try:
        exists = path.exists()
    except OSError as error:  # the operating system refuses the path, for example because the name is too long
        raise DataError(f"{source}: this path cannot be looked up: {error.strerror}. Give {_ENDINGS}.") from error
    if "::" in source and exists:
        raise DataError(
            f"{source}: `datasets` and fsspec read :: in a path as a file inside an archive. Rename the file."
        )
    if path.is_file():
        files = [path]
    elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return path
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if _kind(file) in FORMATS)
        if not files:
            raise DataError(f"{source}: this folder has no file of a supported kind. Give {_ENDINGS}.")
    else:
        files = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
        if not files and is_hub_name(source):
            return None
        if not files:
            raise DataError(f"{source}: this data file does not exist. Give {_ENDINGS}, or a name on the hub.")
    kinds = {_kind(file) for file in files}
    if len({FORMATS.get(kind, kind) for kind in kinds}) > 1:
        raise DataError(f"{source}: files of several kinds ({', '.join(sorted(kinds))}). Give files of one kind.")
    if not kinds <= FORMATS.keys():
        (kind,) = kinds
        raise DataError(f"{source}: files ending in {kind or 'nothing'} cannot be read. Give {_ENDINGS}.")
    return files


def _kind(file: Path) -> str:
    return (Path(file.stem) if file.suffix in COMPRESSIONS else file).suffix.lower()


def _downloaded(source: str) -> Path:
    from huggingface_hub import hf_hub_download

    address = _HUB_FILE.fullmatch(source)
    if address is None:
        raise DataError(
            f"{source}: a file on the hub is named {HUB}<owner>/<name>/<file>, or …<name>@<revision>/<file>."
        )
    try:
        repository, revision, file = address.group("repo_id", "revision", "filename")
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    # The hub, the network, the local cache or HF_HUB_OFFLINE can make the download fail
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: cannot be downloaded: {in_one_line(error)}") from None


def _load_from_hub(source: str, cache: str | None, load_args: dict[str, Any]) -> Dataset:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    address = _HUB_NAME.fullmatch(source)
    assert address is not None
    named = {key: value for key, value in address.groupdict().items() if value is not None}
    if both := named.keys() & load_args.keys():
        raise DataError(
            f"{source}: the name and load_args both give {', '.join(sorted(both))}. Remove the load_args of this name."
        )
    try:
        loaded = datasets.load_dataset(**{**load_args, **named}, cache_dir=cache)
    except DatasetNotFoundError as error:
        why = in_one_line(error)
        if "gated" in why:
            why += " Accept the dataset's terms on the hub, and set HF_TOKEN or run `hf auth login`."
        else:
            why = f"there is no such file or folder, and the hub has no such dataset: {why}"
        raise DataError(f"{source}: {why}") from None
    except ConnectionError as error:
        raise DataError(
            f"{source}: there is no such file or folder, and no dataset of this name can be loaded from the hub: "
            f"{in_one_line(error)}"
        ) from None
    except (OSError, ValueError) as error:  # the hub has the dataset, but the configuration or split does not exist
        raise DataError(f"{source}: cannot be loaded: {in_one_line(error)}") from error
    return _one_split(loaded, source)


def _load_saved(folder: Path, split: str | None) -> Dataset:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be loaded: {in_one_line(error)}") from error
    return _one_split(loaded, str(folder), split)


def _one_split(loaded: Any, source: str, split: str | None = None) -> Dataset:
    """Return the table itself, or a split of a `DatasetDict`: `split`, else `train`, else the only split."""
    if not isinstance(loaded, dict):
        return loaded
    chosen = split
    if not chosen and "train" in loaded:
        chosen = "train"
    elif not chosen and len(loaded) == 1:
        (chosen,) = loaded
    if chosen not in loaded:
        raise DataError(f"{source}: the splits are {', '.join(loaded)}. Name one, as in <owner>/<name>:<split>.")
    return loaded[chosen]


def _load_files(
    source: str, files: list[Path], text_column: str, cache: str | None, load_args: dict[str, Any]
) -> Dataset:
    import datasets

    # Imported inside the function because the module imports transformers, which is slow
    from ppo_rlhf.models.quiet import errors_only

    builder = FORMATS[_kind(files[0])]
    if builder == "csv" and not load_args:
        return datasets.concatenate_datasets([_read_csv(file, text_column) for file in files])
    options = {"encoding": "utf-8-sig"} if builder == "text" else {}
    try:
        # Silence the log of `datasets`, because the DataError below already reports a damaged file
        with errors_only("datasets", logging.CRITICAL), bars(sum(file.stat().st_size for file in files) > _LARGE):
            table = datasets.load_dataset(
                builder,
                **{**options, "split": "train", **load_args},
                # Escape the paths, because `datasets` reads them as glob patterns
                data_files=[glob.escape(str(file)) for file in files],
                cache_dir=cache,
            )
    # The builders of `datasets` raise errors of many libraries, for example StopIteration for an empty file
    except Exception as error:
        rows = [row for file in files for row in _read_by_line(file, builder)]
        if not rows:
            raise DataError(f"{source}: cannot be loaded: {in_one_line(error.__cause__ or error)}") from error
        table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    if builder != "text":
        return table
    with bars(len(table) > LONG):
        table = table.filter(lambda texts: [bool(text.strip()) for text in texts], input_columns="text", batched=True)
    return table.rename_column("text", text_column) if text_column != "text" else table


def _read_by_line(file: Path, builder: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON file that `datasets` cannot read, for example because of mixed types and empty lines.

    Return no rows for a file that is not JSON. The error names the line that cannot be read.
    """
    if file.stat().st_size == 0:
        raise DataError(f"{file}: this data file is empty; a data file needs at least one row.")
    if builder not in ("json", "text"):
        return []
    text = _text(file)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{file}: {_NO_ROWS}")
    if builder == "text":
        return []
    if text.lstrip().startswith("["):
        rows = [(f"row {row}", value) for row, value in enumerate(_parsed(file, 1, text))]
    else:
        rows = [(f"line {number}", _parsed(file, number, line)) for number, line in lines]
    if not rows:
        raise DataError(f"{file}: {_NO_ROWS}")
    for place, value in rows:
        if not isinstance(value, dict):
            raise DataError(f"{file}: {place} is not an object with named columns: {json.dumps(value)[:40]}")
    return [value for _, value in rows]


def _text(file: Path) -> str:
    try:
        with fsspec.filesystem("file").open(str(file), "rb", compression="infer") as opened:
            content = opened.read()
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: this data file is damaged: {in_one_line(error)}") from error
    try:
        return str(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(f"{file}: line {number} is damaged: it is not UTF-8 text.") from error


def _parsed(file: Path, number: int, text: str) -> Any:
    """Return the value of a JSON text; `number` is the line of the file in which the text begins."""
    try:
        value = json.loads(text)
        # Encoding as UTF-8 fails if the JSON escapes only half of a surrogate pair (`\ud83d` alone)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise DataError(f"{file}: line {line} is damaged: it is not valid JSON ({error.msg}).") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{file}: line {number} is damaged: it has half of a surrogate pair.") from error
    # Python's json refuses numbers with thousands of digits, and fails at thousands of nested brackets
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: line {number} cannot be read: {error}.") from error
    return value


def _read_csv(file: Path, text_column: str) -> Dataset:
    """Return the table of a CSV file.

    Only an empty cell is a missing value, and a column of whole numbers with a missing value keeps whole numbers.
    """
    import datasets

    surplus = "Rows have more cells than the header; quote texts that contain commas."
    try:
        frame = pd.read_csv(
            file,
            encoding="utf-8-sig",
            dtype=dict.fromkeys((*_TEXT_COLUMNS, text_column), "string"),
            dtype_backend="numpy_nullable",
            keep_default_na=False,
            na_values=[""],
        )
    # pandas' ParserError is a ValueError, and its message names the line
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            _text(file)  # `_text` decodes the file again and raises an error that names the undecodable line
        reason = in_one_line(error)
        raise DataError(
            f"{file}: this CSV file is damaged: {reason}{f'. {surplus}' if 'saw' in reason else ''}"
        ) from error
    # If the rows have more cells than the header, pandas takes the first cells as row labels
    if not isinstance(frame.index, pd.RangeIndex):
        raise DataError(f"{file}: this CSV file is damaged: {surplus}")
    return datasets.Dataset.from_pandas(frame, preserve_index=False)


def table_of(columns: Mapping[str, Sequence[Any]]) -> Dataset:
    """Return a table of columns in memory; a column may have values of several types.

    Raises:
        DataError: The columns differ in length, or Arrow has no type for a value.
    """
    import datasets

    try:
        plain = {
            name: [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values]
            for name, values in columns.items()
        }
        return datasets.Dataset.from_dict(plain, on_mixed_types="use_json")
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"this table cannot be read: {in_one_line(error)}") from error


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Show the progress bars of `datasets` within the block only if `shown`: a short table needs none."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
