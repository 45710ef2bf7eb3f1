"""Read JSON files as one table without loss: every column, every key of nested objects and every digit is kept.

The JSON builder of `datasets` is not used, even with the whole file as one chunk. It rounds floats to 10 digits in JSON
arrays and beside a column of mixed types, reads "5" beside 5 as a number and dates as timestamps, and fills in keys
that an object lacks if one number of the file has more than 64 bits.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from datasets import ArrowBasedBuilder, Dataset, DatasetInfo, Features, Json, SplitGenerator, Value
from datasets.builder import Key
from datasets.features.features import register_feature

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.data.files import digest

NO_ROWS = "this data file has no rows; a data file needs at least one row."
_VERSION = "2"  # part of the cache's key: raise it if the same files would give another table
_BATCH = 1_000
_EXACT = 2**53  # a float is exact for whole numbers up to this one
_LONG = 2**63  # a whole number of Arrow is smaller than this one


@dataclass(repr=False)
class ExactJson(Json):
    """A column of any JSON values. Unlike `Json` the column tells "5" from 5 and keeps all digits of a number.

    `to_list` and `to_dict` of `datasets` read every column of JSON with pandas' ujson, which rounds the last digit of a
    float. Rows, slices and columns are exact.
    """

    _type: str = field(default="ExactJson", init=False, repr=False)

    def encode_example(self, example_data: Any) -> str | None:
        return None if example_data is None else json.dumps(example_data, ensure_ascii=False)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(example_data)

    def __repr__(self) -> str:
        return "ExactJson()"


with warnings.catch_warnings(action="ignore"):  # `datasets` calls the function experimental
    register_feature(ExactJson, "ExactJson")


def read_json(files: Sequence[Path], cache: str | None) -> Dataset:
    """Return the memory-mapped table of JSON files: objects, one a line or one after another, or lists of objects.

    A column that some rows lack has None there. A column of texts, of truth values or of numbers has the type of its
    values; whole numbers beside fractions are floats if floats are exact for them. Every other column is `ExactJson`.

    Raises:
        DataError: A file is damaged, a value is not an object, an object has a key twice, a number is too
            large for a float, or no file has rows.
    """
    builder = JsonTables(files, cache_dir=cache, dataset_name="json", config_name=digest(files), hash=_VERSION)
    builder.download_and_prepare()
    return builder.as_dataset(split="train")


class JsonTables(ArrowBasedBuilder):
    """Writes the rows of JSON files into the cache of `datasets`, with types that fit all rows."""

    def __init__(self, files: Sequence[Path], **settings: Any) -> None:
        self._files = files
        super().__init__(**settings)

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        kinds: dict[str, set[str]] = {}
        for file in self._files:
            for row in _rows(file):
                for name, value in row.items():
                    kinds.setdefault(name, set()).add(_kind(value))
        if not kinds:
            raise DataError(f"{self._files[0]}: {NO_ROWS}")
        self.info.features = Features({name: _feature(found) for name, found in kinds.items()})
        return [SplitGenerator(name="train", gen_kwargs={"files": self._files})]

    def _generate_shards(self, files: Sequence[Path]) -> Iterator[str]:
        yield from map(str, files)

    def _generate_tables(self, files: Sequence[Path]) -> Iterator[tuple[Key, pa.Table]]:
        features = self.info.features
        for number, file in enumerate(files):
            rows = _rows(file)
            for part in count():
                if not (batch := list(islice(rows, _BATCH))):
                    break
                columns = {
                    name: [_stored(feature, row.get(name)) for row in batch] for name, feature in features.items()
                }
                yield Key(number, part), pa.table(columns, schema=features.arrow_schema)


def _kind(value: Any) -> str:
    """Return the type of Arrow that holds a value, and "whole" for whole numbers that a float holds, too."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "whole" if abs(value) <= _EXACT else "int64" if -_LONG <= value < _LONG else "json"
    return {type(None): "null", str: "string", bool: "bool", float: "float64"}.get(type(value), "json")


def _feature(kinds: set[str]) -> Any:
    """Return the feature of a column with values of these kinds."""
    kinds = kinds - {"null"} or kinds
    for known in ({"null"}, {"string"}, {"bool"}, {"whole", "int64"}, {"whole", "float64"}):
        if kinds <= known:
            return Value(max(known - {"whole"}))
    return ExactJson()


def _stored(feature: Any, value: Any) -> Any:
    return feature.encode_example(value) if isinstance(feature, ExactJson) else value


# --- the rows of a file


class _UnreadableError(ValueError):
    """JSON that is valid has a value that cannot be kept as it is."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _UnreadableError(f"an object has the key `{next(name for name in names if names.count(name) > 1)}` twice")
    return found


def _float(text: str) -> float:
    """Return a number with a point or an exponent."""
    if math.isinf(value := float(text)):
        raise _UnreadableError(f"the number {text[:40]} is too large for a float")
    return value


def _constant(text: str) -> float:
    """Return NaN, which Python and pandas write; JSON has neither it nor Infinity."""
    if text != "NaN":
        raise _UnreadableError(f"{text} is no number of JSON. Write a number, or null for a missing value")
    return math.nan


_NO_SPACE = re.compile(r"\S")
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for place, value in _values(file):
        if not isinstance(value, dict):
            raise DataError(f"{file}: {place} is not an object with named columns: {json.dumps(value)[:40]}")
        yield value


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place of a value, as errors name it; value).

    Each line is a value, or the whole text is read if the first line alone is no row.
    """
    lines = ((number, line) for number, line in _lines(file) if not line.isspace())
    first = next(lines, None)
    if first is not None and _is_row(first[1]):
        for number, line in chain([first], lines):
            with _named_damage(file, number):
                value = _DECODER.decode(line.rstrip())
                _check_surrogates(value, line)
            yield f"line {number}", value
        return
    text = "".join(line for _, line in _lines(file))
    start = row = 0
    while begin := _NO_SPACE.search(text, start):
        with _named_damage(file, 1):
            value, start = _DECODER.raw_decode(text, begin.start())
            _check_surrogates(value, text)
        for item in value if isinstance(value, list) else [value]:
            yield f"row {row}", item
            row += 1


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line."""
    try:
        with fsspec.filesystem("file").open(str(file), "rb", compression="infer") as opened:
            for number, line in enumerate(opened, 1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{file}: line {number} is damaged: it is not UTF-8 text.") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{file}: this data file is damaged: {in_one_line(error)}") from error


def _is_row(line: str) -> bool:
    """Return whether the first line of a file is a whole object, or begins with one, so that each line is a row."""
    try:
        return isinstance(_DECODER.raw_decode(line.lstrip())[0], dict)
    except (ValueError, RecursionError) as error:
        return not isinstance(error, json.JSONDecodeError)


@contextmanager
def _named_damage(file: Path, number: int) -> Iterator[None]:
    """Turn errors of parsing into `DataError`; `number` is the line of the file in which the parsed text begins."""
    try:
        yield
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise DataError(f"{file}: line {line} is damaged: it is not valid JSON ({error.msg}).") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{file}: line {number} is damaged: it has half of a surrogate pair.") from error
    # Python's json refuses numbers with thousands of digits, and fails at thousands of nested brackets
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: line {number} cannot be read: {error}.") from error


def _check_surrogates(value: Any, text: str) -> None:
    """Raise `UnicodeEncodeError` if the JSON escapes only half of a surrogate pair."""
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
