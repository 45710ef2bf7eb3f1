"""Read JSON files as one table without loss: every column, every key of nested objects and every digit is kept.

The JSON builder of `datasets` takes the columns from the first 10 MB, reads a text such as "5" in a column of mixed
types as a number, rounds the numbers of such a column, and reads dates as timestamps. So the types of this module's
builder come from all rows, and its columns of mixed types are exact.
"""

from __future__ import annotations

import glob
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
from datasets import ArrowBasedBuilder, Dataset, DatasetInfo, Features, Json, List, SplitGenerator, Value
from datasets.builder import Key
from datasets.features.features import register_feature

from ppo_rlhf.core.errors import DataError, in_one_line

NO_ROWS = "this data file has no rows; a data file needs at least one row."
_VERSION = "1"  # part of the cache's key: raise it if the same files would give another table
_BATCH = 1_000
_DEEPEST = 16  # values below this depth are kept as JSON, because Arrow cannot nest types without end
_EXACT = 2**53  # a float is exact for whole numbers up to this one


@dataclass(repr=False)
class ExactJson(Json):
    """A column of any JSON values. Unlike `Json` the column tells "5" from 5 and keeps all digits of a number."""

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

    A column that some rows lack has None there. Whole numbers beside fractions are floats if floats are exact for them.
    A column or a nested value whose types differ otherwise, or whose objects have different keys, is `ExactJson`.

    Raises:
        DataError: A file is damaged, a value is not an object, an object has a key twice, a number is too
            large for a float, or no file has rows.
    """
    patterns = [glob.escape(str(file)) for file in files]  # `datasets` reads the paths as glob patterns
    builder = JsonTables(cache_dir=cache, hash=_VERSION, data_files=patterns)
    builder.download_and_prepare()
    return builder.as_dataset(split="train")


class JsonTables(ArrowBasedBuilder):
    """Writes the rows of JSON files into the cache of `datasets`, with types that fit all rows."""

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        files = [Path(file) for file in self.config.data_files["train"]]
        kinds: dict[str, Any] = {}
        has_rows = False
        for file in files:
            for place, row in _rows(file):
                has_rows = True
                for name, value in row.items():
                    try:
                        kinds[name] = _widened(kinds.get(name), value)
                    except OverflowError as error:
                        raise DataError(f"{file}: {place}, column `{name}`: {error}.") from error
        if not has_rows:
            raise DataError(f"{files[0]}: {NO_ROWS}")
        self.info.features = _features(kinds, ExactJson())
        return [SplitGenerator(name="train", gen_kwargs={"files": files, "kinds": kinds})]

    def _generate_shards(self, files: list[Path], kinds: dict[str, Any]) -> Iterator[str]:
        yield from map(str, files)

    def _generate_tables(self, files: list[Path], kinds: dict[str, Any]) -> Iterator[tuple[Key, pa.Table]]:
        stored, schema = _features(kinds, Value("string")).arrow_schema, self.info.features.arrow_schema
        mixed = {name for name, kind in kinds.items() if _is_mixed(kind)}
        for number, file in enumerate(files):
            rows = (row for _, row in _rows(file))
            for part in count():
                if not (batch := list(islice(rows, _BATCH))):
                    break
                columns = {name: [row.get(name) for row in batch] for name in kinds}
                columns |= {name: [_stored(kinds[name], value) for value in columns[name]] for name in mixed}
                yield Key(number, part), pa.table(columns, schema=stored).cast(schema)


# --- the types of values: None, a name, a list of the items' type, a dictionary of the types of an object's keys

_JSON, _TEXT, _BOOL, _WHOLE, _LONG, _FLOAT = "json", "string", "bool", "whole", "int64", "float64"
_NAMES = {None: "null", _TEXT: "string", _BOOL: "bool", _WHOLE: "int64", _LONG: "int64", _FLOAT: "float64"}
_NUMBERS = {frozenset((_WHOLE, _LONG)): _LONG, frozenset((_WHOLE, _FLOAT)): _FLOAT}


def _nests(kind: Any) -> bool:
    return isinstance(kind, dict | list)


def _widened(kind: Any, value: Any, depth: int = 0) -> Any:
    """Return the type of a column or nested value that has the type `kind` so far, with one more value."""
    if value is None or kind == _JSON:
        return kind
    if isinstance(value, str):
        own: Any = _TEXT
    elif isinstance(value, dict):
        if (
            not value
            or depth > _DEEPEST
            or (kind is not None and (type(kind) is not dict or kind.keys() != value.keys()))
        ):
            return _JSON
        kind = dict.fromkeys(value) if kind is None else kind
        for name, item in value.items():
            kind[name] = _widened(kind[name], item, depth + 1)
        return kind
    elif isinstance(value, list):
        kind = [None] if kind is None else kind
        if depth > _DEEPEST or not isinstance(kind, list):
            return _JSON
        for item in value:
            kind[0] = _widened(kind[0], item, depth + 1)
        return kind
    elif isinstance(value, bool):
        own = _BOOL
    elif isinstance(value, float):
        if math.isinf(value):
            raise OverflowError("a number is too large")
        own = _FLOAT
    else:
        own = _WHOLE if abs(value) <= _EXACT else _LONG if -(2**63) <= value < 2**63 else _JSON
    if kind is None or kind == own:
        return own
    return _JSON if _nests(kind) else _NUMBERS.get(frozenset((kind, own)), _JSON)


def _features(kinds: dict[str, Any], mixed: Any) -> Features:
    """Return the features of columns; `mixed` is the feature of values of several types."""

    def feature(kind: Any) -> Any:
        if isinstance(kind, dict):
            return {name: feature(item) for name, item in kind.items()}
        if isinstance(kind, list):
            return List(feature(kind[0]))
        return mixed if kind == _JSON else Value(_NAMES[kind])

    return Features({name: feature(kind) for name, kind in kinds.items()})


def _is_mixed(kind: Any) -> bool:
    """Return whether values of a type are or contain values of several types."""
    return any(map(_is_mixed, kind.values() if isinstance(kind, dict) else kind)) if _nests(kind) else kind == _JSON


def _stored(kind: Any, value: Any) -> Any:
    """Return a value as Arrow stores it: what has several types becomes JSON."""
    if value is None or not _is_mixed(kind):
        return value
    if kind == _JSON:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(kind, list):
        return [_stored(kind[0], item) for item in value]
    return {name: _stored(kind[name], item) for name, item in value.items()}


# --- the rows of a file


class _TwiceError(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(f"an object has the key `{next(name for name in names if names.count(name) > 1)}` twice")
    return found


_NO_SPACE = re.compile(r"\S")
_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place of a row in the file, as errors name it; row)."""
    for place, value in _values(file):
        if not isinstance(value, dict):
            raise DataError(f"{file}: {place} is not an object with named columns: {json.dumps(value)[:40]}")
        yield place, value


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file: line by line, or from the whole text if the first line alone is no value of a row."""
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
