"""Tokenised prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ppo_rlhf.data.chats import TOOLS
from ppo_rlhf.models.origins import Origin

if TYPE_CHECKING:
    from datasets import Dataset

PROMPT_COLUMNS = ("prompt", "prompt_ids", "prompt_chat", "prompt_length")
"""Columns of the tokenised table that this package adds to the user's columns."""


@dataclass(frozen=True)
class PromptDataset:
    """Tokenised prompts with the columns for reward functions. Row i of every column belongs to prompt i.

    A field of a PromptDataset may also be a column of a `datasets.Dataset`, whose values stay on disk until rows are
    selected.
    """

    prompt_ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]]
    chats: list[str | None] = field(default_factory=list)
    """The messages of each chat prompt as JSON, None for a plain-text prompt; empty: all prompts are plain text."""
    made_from: tuple[Origin, ...] = ()
    """The table from which the prompts were read, if it is known."""

    @classmethod
    def of_table(cls, table: Dataset) -> PromptDataset:
        """Return the prompts of a table with `prompt`, `prompt_ids` and the other columns."""
        lists: Any = table  # typed as Any, because a table and a dict of lists are both read as columns of lists
        columns = {name: lists[name] for name in table.column_names if name not in PROMPT_COLUMNS}
        chats = lists["prompt_chat"] if "prompt_chat" in table.features else []
        return cls(lists["prompt_ids"], lists["prompt"], columns, chats)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt."""
        table = getattr(self.prompt_ids, "source", None)
        return (
            [len(ids) for ids in self.prompt_ids] if table is None else arrow_column(table, "prompt_length").to_pylist()
        )

    @property
    def messages(self) -> list[list[dict[str, Any]] | None]:
        """The messages of each prompt, None for a plain-text prompt; empty: all prompts are plain text."""
        return [None if chat is None else json.loads(chat) for chat in self.chats]

    @cached_property
    def has_chats(self) -> bool:
        """Whether some prompt is a chat."""
        table = getattr(self.chats, "source", None)
        if table is None:
            return any(chat is not None for chat in self.chats)
        return arrow_column(table, "prompt_chat").null_count < len(self)

    def select(self, indices: Sequence[int]) -> PromptDataset:
        """Return the rows at `indices`, in this order and in memory; an index may occur more than once."""
        columns = {name: _rows(values, indices) for name, values in self.columns.items()}
        chats = _rows(self.chats, indices) if len(self.chats) else []
        return PromptDataset(_rows(self.prompt_ids, indices), _rows(self.texts, indices), columns, chats)

    def texts_frame(self) -> pd.DataFrame:
        """Return a table with the column `prompt`, and `prompt_chat` and `tools` (JSON) if some prompts are chats."""
        columns = {"prompt": self.texts, "prompt_chat": self.chats} if self.has_chats else {"prompt": self.texts}
        table = getattr(self.texts, "source", None)
        frame = pd.DataFrame(
            {
                name: values if table is None else arrow_column(table, name).to_pandas()
                for name, values in columns.items()
            }
        )
        if self.has_chats and TOOLS in self.columns:
            frame[TOOLS] = [as_json(value) for value in self.columns[TOOLS][:]]
        return frame

    def to_frame(self) -> pd.DataFrame:
        """Return a table with `prompt`, `prompt_ids` and the other columns, whose values are JSON.

        Parquet has no type for columns of mixed values. Values without a type in JSON, such as dates, become text.
        """
        others = {name: [as_json(value) for value in values[:]] for name, values in self.columns.items()}
        chats = {"prompt_chat": self.chats[:]} if len(self.chats) else {}
        return pd.DataFrame({**others, "prompt": self.texts[:], "prompt_ids": self.prompt_ids[:], **chats})

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> PromptDataset:
        """Return the dataset of a table that `to_frame` returned."""
        names = [str(name) for name in frame.columns if name not in PROMPT_COLUMNS]
        chats = [chat if isinstance(chat, str) else None for chat in frame.get("prompt_chat", [])]
        columns = {name: [json.loads(value) for value in frame[name]] for name in names}
        return cls([[int(i) for i in ids] for ids in frame["prompt_ids"]], frame["prompt"].tolist(), columns, chats)


def arrow_column(table: Dataset, name: str) -> pa.ChunkedArray:
    """Return a column as Arrow data, without creating Python objects.

    Selected rows are gathered in one call; `datasets` would gather the rows one by one.
    """
    column = table.data.column(name)
    return column if table._indices is None else column.take(table._indices.column(0))


def _rows(values: Any, indices: Sequence[int]) -> list[Any]:
    # Index a column of `datasets` with all indices at once, because one access can read many rows
    return [values[i] for i in indices] if isinstance(values, list) else list(values[list(indices)])


def as_json(value: Any, *, sort_keys: bool = False, indent: int | None = None) -> str:
    """Return a value as JSON. NumPy arrays and numbers become lists and numbers, other types that JSON lacks text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
