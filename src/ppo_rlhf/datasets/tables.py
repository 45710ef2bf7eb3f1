"""Catalog entries for tables that the pipelines write, and the preview of a table in Kedro-Viz."""

import json
from typing import Any

import pandas as pd
import pyarrow.parquet
from kedro_datasets._typing import TablePreview
from kedro_datasets.pandas import CSVDataset, ParquetDataset

FORMULA = (*"=+-@\t\r'",)
UTF_8: dict[str, Any] = {"open_args_save": {"mode": "w", "encoding": "utf-8"}}
"""Arguments for kedro-datasets' CSVDataset, which by default writes in the locale's encoding but reads UTF-8."""


class TableDataset(ParquetDataset):
    """A Parquet table whose preview supports lists, such as token ids: kedro-datasets' preview fails on arrays.

    ```yaml
    demonstrations:
      type: ppo_rlhf.datasets.TableDataset
      filepath: data/03_primary/demonstrations.parquet
    ```
    """

    def preview(self, nrows: int = 5) -> TablePreview:
        return table_preview(pyarrow.parquet.read_table(str(self._get_load_path()))[:nrows].to_pandas())


class OptionalTableDataset(TableDataset):
    """A Parquet table for an optional input: the entry loads as None until a run has written the table."""

    def load(self) -> pd.DataFrame | None:
        return super().load() if self.exists() else None


class TrainingPromptsDataset(OptionalTableDataset):
    """The prompts of the newest training.

    The entry loads as None if the newest training did not make the policy: `policy_path` is set, or `is_of_policy` is
    False.
    """

    def __init__(self, policy_path: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.is_of_policy = policy_path is None

    def _exists(self) -> bool:
        return self.is_of_policy and super()._exists()


class TrainingHistoryDataset(CSVDataset):
    """The training history of the newest run as CSV.

    The table is empty if there is no training history, or if the newest run did not train the policy: `policy_path` is
    set, or `is_of_policy` is False.
    """

    DEFAULT_FS_ARGS = UTF_8

    def __init__(self, policy_path: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.is_of_policy = policy_path is None

    def load(self) -> pd.DataFrame:
        return super().load() if self.is_of_policy and super()._exists() else pd.DataFrame()

    def _exists(self) -> bool:
        # Tell Kedro that the file exists: a missing history loads as an empty table, which the report accepts
        return True


class SpreadsheetDataset(CSVDataset):
    """A CSV table that is safe to open in a spreadsheet: an apostrophe before a text keeps it from being a formula.

    Loading the CSV table removes the apostrophe before each text.
    """

    DEFAULT_FS_ARGS = UTF_8

    def save(self, data: pd.DataFrame) -> None:
        super().save(data.map(lambda cell: f"'{cell}" if isinstance(cell, str) and cell[:1] in FORMULA else cell))

    def load(self) -> pd.DataFrame:
        return super().load().map(lambda cell: cell[1:] if isinstance(cell, str) and cell[:1] == "'" else cell)


def table_preview(rows: pd.DataFrame) -> TablePreview:
    """Return rows in Kedro-Viz's format. Nested values become JSON text, because Kedro-Viz shows them as `[object
    Object]`.
    """
    table = json.loads(rows.to_json(orient="split"))
    table["data"] = [[_readable(value) for value in row] for row in table["data"]]
    return TablePreview(table)


def _readable(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
