"""Tokenised prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

PROMPT_COLUMNS = ("prompt", "prompt_ids")
"""Columns of the stored table that are not the user's."""


@dataclass(frozen=True)
class PromptDataset:
    """Tokenised prompts with the columns that reward functions are called with. Row i of every list is one prompt."""

    prompt_ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select(self, indices: Sequence[int]) -> PromptDataset:
        """Return the rows at `indices`, in that order; an index may come more than once."""
        return PromptDataset(
            [self.prompt_ids[i] for i in indices],
            [self.texts[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a table with `prompt`, `prompt_ids` and the other columns, whose values are JSON.

        Parquet has no type for columns of nested or mixed values. Values that JSON lacks, such as dates, become text.
        """
        others = {name: [as_json(value) for value in values] for name, values in self.columns.items()}
        return pd.DataFrame({**others, "prompt": self.texts, "prompt_ids": self.prompt_ids})

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> PromptDataset:
        """Return the dataset that `to_frame` made the table of."""
        names = map(str, frame.columns.drop(list(PROMPT_COLUMNS)))
        columns = {name: [json.loads(value) for value in frame[name]] for name in names}
        return cls([[int(i) for i in ids] for ids in frame["prompt_ids"]], frame["prompt"].tolist(), columns)


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """Return a value as JSON: NumPy's arrays and numbers as Python's, anything else that JSON lacks as text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
