"""Conversion of tables to pandas with the types kept, and the split into training and held-out rows."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.data.files import HUB, is_hub_name
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.runtime.log_lines import say_once
from ppo_rlhf.runtime.paths import place

if TYPE_CHECKING:
    from datasets import Dataset

_CHECKSUM, _MADE_FROM = "checksum", "made_from"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def with_source(table: Dataset, source: str, digest: str | None) -> Dataset:
    """Return the same table; its `DatasetInfo` then names its source and the digest of its files, if that is known."""
    table.info.download_checksums = {source: {_CHECKSUM: digest}}
    return table


def commit_of(table: Dataset) -> str | None:
    """Return the commit of a table that `datasets` has loaded from the hub; None if the table has no files.

    `datasets` keeps the files in a folder that is named like the commit.
    """
    commits = {part for file in table.cache_files for part in Path(file["filename"]).parts if _COMMIT.fullmatch(part)}
    return commits.pop() if len(commits) == 1 else None


def origins_of(table: Dataset | None, role: str) -> tuple[Origin, ...]:
    """Return the origin that `with_source` named; empty without a table, or if the table has no such origin."""
    named = {} if table is None else table.info.download_checksums or {}
    return tuple(
        Origin("table", role, place(source), entry[_CHECKSUM], source.startswith(HUB) or is_hub_name(source))
        for source, entry in named.items()
        if set(entry) == {_CHECKSUM}
    )


def with_origins(frame: pd.DataFrame, made_from: Iterable[Origin]) -> pd.DataFrame:
    """Return a table that knows the origins of its rows. Parquet keeps them, as pandas writes `DataFrame.attrs`."""
    marked = frame.copy(deep=False)
    marked.attrs = {**frame.attrs, _MADE_FROM: [asdict(origin) for origin in made_from]}
    return marked


def origins_of_frame(frame: pd.DataFrame) -> tuple[Origin, ...]:
    """Return the origins that `with_origins` stored with a table; empty for another table."""
    return tuple(map(Origin.from_dict, frame.attrs.get(_MADE_FROM, ())))


def frame_of(table: Dataset) -> pd.DataFrame:
    """Return a table as a DataFrame in memory.

    A column with values of several types, including None, gets the dtype object: pandas would turn whole numbers into
    floats beside a missing value.
    """
    columns: dict[str, list[Any]] = table[:]
    kinds = {name: object if len({*map(type, values)}) > 1 else None for name, values in columns.items()}
    return pd.DataFrame({name: pd.Series(values, dtype=kinds[name]) for name, values in columns.items()})


def hold_out(
    keys: Sequence[Hashable],
    share: float,
    maximum: int,
    seed: int,
    stream: str,
    *,
    name: str,
    advice: str = "Give more.",
    copies: bool = False,
) -> tuple[list[int], list[int]]:
    """Return (rows to train on, rows held out), each in the table's order.

    `keys` has one key per row. A seeded share of the distinct keys is held out: at least one key, at most `maximum`
    keys, and never all keys. Rows with equal keys are never both trained on and held out. With `copies` all rows of a
    held-out key are held out; without `copies` only the first row of a held-out key is held out, and further rows with
    this key are dropped, and one log line counts them. `name` begins the line and the error, `advice` ends the error.

    Raises:
        DataError: The rows have fewer than two distinct keys.
    """
    numbers, distinct = pd.factorize(pd.Series(keys, dtype=object))
    if len(distinct) < 2:
        raise DataError(f"{name}: {len(distinct)} distinct row(s) cannot be split in two. {advice}")
    count = min(maximum, max(1, round(share * len(distinct))), len(distinct) - 1)
    chosen = np.isin(numbers, permutation(len(distinct), seed, stream)[:count].numpy())
    again = pd.Series(numbers).duplicated().to_numpy()
    if not copies and (left_out := int((chosen & again).sum())):
        say_once(
            f"{name}: {left_out} of {len(keys)} are copies of others that are held out, and are left out.", logging.INFO
        )
    return np.flatnonzero(~chosen).tolist(), np.flatnonzero(chosen if copies else chosen & ~again).tolist()
