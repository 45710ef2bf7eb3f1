"""Tables that keep values as they were given: pandas turns whole numbers into floats where one is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd


def table_of_rows(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table, None where one has no value of a name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return table_of_columns({name: [row.get(name) for row in rows] for name in names})


def table_of_columns(columns: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return the columns as a table; values of several types, None among them, stay as they are."""
    return pd.DataFrame({name: pd.Series(list(values), dtype=_dtype(values)) for name, values in columns.items()})


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """Return a value as JSON: NumPy's arrays and numbers as Python's, anything else that JSON lacks as text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _dtype(values: Sequence[Any]) -> type | None:
    return object if len({type(value) for value in values}) > 1 else None
