"""Find a user's table, load it with `datasets`, and report what is wrong with a file that cannot be loaded."""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.data.csv_tables import decoded, read_csv
from ppo_rlhf.data.files import FORMATS, HUB_NAME, digest, find, kind_of

# Imported here only for type checkers: `datasets` takes two seconds to import, so functions that use it import it
if TYPE_CHECKING:
    from datasets import Dataset, Features

LONG = 10_000
"""A progress bar is shown for tables with more rows than this."""
_LARGE = 10_000_000  # a progress bar is shown when reading more than this many bytes


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
    options = dict(load_args or {})
    found = find(source, options.get("split"))
    if found is None:
        table = _load_from_hub(source, cache, options)
    elif found.saved is not None:
        table = _load_saved(source, found.saved, found.split)
    else:
        options.pop("split", None)
        table = _load_files(source, found.files, text_column, cache, options)
    if found is not None and found.part:
        table = _part(table, found.part, source)
    if not len(table):
        raise DataError(f"{source}: this table has no rows; a table needs at least one row.")
    try:
        check_texts(table, source)
    except DataError:
        # Check each file separately, so that the error names the damaged file and its row
        for file in found.files if found is not None and found.saved is None else ():
            check_texts(_load_files(str(file), [file], text_column, cache, options), str(file))
        raise
    return table


def check_texts(table: Dataset, source: str) -> None:
    """Raise `DataError` with row and column if a text is not UTF-8.

    Without this check `datasets` would fail only when the row is read. Arrow checks a gigabyte in half a second, so the
    whole table is checked first, and single rows are read only if the table holds a damaged text.
    """
    try:
        table.data.table.validate(full=True)
        return
    except pa.ArrowInvalid:
        columns = {name: table.select_columns([name]) for name in table.column_names}
    for name, column in columns.items():
        for row in range(len(column)):
            try:
                column[row]
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source}: row {row}, column `{name}`: the text is not UTF-8. Write the file as UTF-8, or remove "
                    "the row."
                ) from error


def _load_from_hub(source: str, cache: str | None, load_args: dict[str, Any]) -> Dataset:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    address = HUB_NAME.fullmatch(source)
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


def _load_saved(source: str, folder: Path, split: str | None) -> Dataset:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be loaded: {in_one_line(error)}") from error
    if split not in (None, "train") and not isinstance(loaded, dict):
        raise DataError(f"{source}: the folder holds one table without splits, not `{split}`. Leave out the split.")
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


def _part(table: Dataset, part: str, source: str) -> Dataset:
    """Return the rows that a part of a split such as [:10%] names."""
    from datasets import ReadInstruction

    try:
        (rows,) = ReadInstruction.from_spec(f"rows{part}").to_absolute({"rows": len(table)})
    except (ValueError, AssertionError) as error:
        raise DataError(f"{source}: the part {part} of the split cannot be read: {in_one_line(error)}") from error
    return table.select(range(rows.from_ or 0, len(table) if rows.to is None else rows.to))


def _load_files(
    source: str, files: list[Path], text_column: str, cache: str | None, load_args: dict[str, Any]
) -> Dataset:
    import datasets

    from ppo_rlhf.runtime.log_lines import errors_only, say_once

    builder = FORMATS[kind_of(files[0])]
    if not any(file.stat().st_size for file in files):
        raise DataError(f"{files[0]}: this data file is empty; a data file needs at least one row.")
    if builder == "csv" and not load_args:
        return read_csv(files, text_column)
    shown = sum(file.stat().st_size for file in files) > _LARGE
    if builder == "json" and not load_args:
        from ppo_rlhf.data.json_tables import read_json

        with bars(shown):
            return read_json(files, cache)
    options: dict[str, Any] = {"encoding": "utf-8-sig"} if builder == "text" else {}
    if builder in ("parquet", "arrow") and len(files) > 1:
        options["features"] = _joint_features(files, builder)

    def load(files: list[Path], **given: Any) -> Dataset:
        # Silence the log of `datasets`, because the DataError below already reports a damaged file
        with errors_only("datasets", logging.CRITICAL), bars(shown):
            return datasets.load_dataset(
                builder,
                # The name is part of the cache's key, which without the digest has only the files' paths and times
                **{**options, "split": "train", **load_args, **given, "name": digest(files)},
                # Escape the paths, because `datasets` reads them as glob patterns
                data_files=[glob.escape(str(file)) for file in files],
                cache_dir=cache,
            )

    try:
        table = load(files)
    # The builders of `datasets` raise errors of many libraries, for example StopIteration for an empty file
    except Exception as error:
        for file in files if len(files) > 1 else ():
            _check_file(file, load, options.get("features"))
        if builder == "text":
            decoded(files[0])
        raise DataError(f"{source}: cannot be loaded: {in_one_line(error.__cause__ or error)}") from error
    if builder != "text":
        return table
    lines = len(table)
    with bars(lines > LONG):
        table = table.filter(lambda texts: [bool(text.strip()) for text in texts], input_columns="text", batched=True)
    if blank := lines - len(table):
        say_once(f"{source}: {blank} of {lines} lines are blank, and are left out.", logging.INFO)
    return table.rename_column("text", text_column) if text_column != "text" else table


def _joint_features(files: list[Path], builder: str) -> Features | None:
    """Return features that fit the columns of all files; None if the files have the same columns."""
    from datasets import Features

    schemas = [_schema(file, builder) for file in files]
    joint = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        try:
            joint = pa.unify_schemas([joint, schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"{file}: its columns do not fit those of the files before it: {in_one_line(error)}. Write the column "
                "with one type in all files."
            ) from error
    # pyarrow joins text and bytes as bytes
    for file, schema in zip(files, schemas, strict=True):
        for column in schema:
            if "string" in str(column.type) and "string" not in str(joint.field(column.name).type):
                raise DataError(
                    f"{file}: column `{column.name}` is text here, and bytes in another file. Write it as text."
                )
    return None if all(schema.equals(joint) for schema in schemas) else Features.from_arrow_schema(joint)


def _schema(file: Path, builder: str) -> pa.Schema:
    try:
        with file.open("rb") as opened:
            if builder == "parquet":
                return pq.read_schema(opened).remove_metadata()
            try:
                return pa.ipc.open_stream(opened).schema.remove_metadata()
            except pa.ArrowInvalid:
                return pa.ipc.open_file(opened).schema.remove_metadata()
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{file}: cannot be loaded: {in_one_line(error)}") from error


def _check_file(file: Path, load: Callable[..., Dataset], features: Features | None) -> None:
    """Raise `DataError` if one of several files cannot be read, or a column's values do not fit `features`."""
    from datasets.table import table_cast

    place = str(file)
    try:
        table = load([file], features=None)
        schema = table.data.schema if features is None else features.arrow_schema
        for name in table.column_names:
            place = f"{file}: column `{name}`"
            table_cast(table.data.table.select([name]), pa.schema([schema.field(name)]))
    except Exception as error:
        raise DataError(f"{place}: cannot be loaded: {in_one_line(error.__cause__ or error)}") from error


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
