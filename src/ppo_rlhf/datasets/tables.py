"""Tables that the pipelines write, and how any table is shown in Kedro-Viz."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
from kedro_datasets._typing import TablePreview
from kedro_datasets.pandas import CSVDataset, ParquetDataset

FORMULA = (*"=+-@\t\r'",)
UTF_8: dict[str, Any] = {"open_args_save": {"mode": "w", "encoding": "utf-8"}}
"""For kedro-datasets' CSV, which writes as the locale says and reads UTF-8."""


class TableDataset(ParquetDataset):
    """Parquet as kedro-datasets has it, but a preview of lists (token ids) too: its own gives arrays, not JSON.

    ```yaml
    demonstrations:
      type: ppo_rlhf.datasets.TableDataset
      filepath: data/03_primary/demonstrations.parquet
    ```
    """

    def preview(self, nrows: int = 5) -> TablePreview:
        return table_preview(pyarrow.parquet.read_table(str(self._get_load_path()))[:nrows].to_pandas())


class OptionalTableDataset(TableDataset):
    """The same, for an input that one run needs and another does not: it loads as None until it is written."""

    def load(self) -> pd.DataFrame | None:
        return super().load() if self.exists() else None


class TrainingHistoryDataset(CSVDataset):
    """The newest run's history as CSV; empty if there is none, or if `policy_path` names a policy of another origin."""

    DEFAULT_FS_ARGS = UTF_8

    def __init__(self, policy_path: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._is_of_another = policy_path is not None

    def load(self) -> pd.DataFrame:
        if self._is_of_another:
            return pd.DataFrame()
        if not super()._exists() and (earlier := self._earlier()).is_file():
            return pd.read_csv(earlier)
        return super().load() if super()._exists() else pd.DataFrame()

    def _earlier(self) -> Path:
        """Return where runs before this layer kept it: they are reported too."""
        return Path(str(self._filepath).replace("/07_model_output/", "/08_reporting/"))

    def _exists(self) -> bool:
        return True  # without a history a report is made as well


class SpreadsheetDataset(CSVDataset):
    """CSV as kedro-datasets has it, in which a spreadsheet finds no formula: an apostrophe hides each, until loaded."""

    DEFAULT_FS_ARGS = UTF_8

    def save(self, data: pd.DataFrame) -> None:
        super().save(data.map(lambda cell: f"'{cell}" if isinstance(cell, str) and cell[:1] in FORMULA else cell))

    def load(self) -> pd.DataFrame:
        return super().load().map(lambda cell: cell[1:] if isinstance(cell, str) and cell[:1] == "'" else cell)


def table_preview(rows: pd.DataFrame) -> TablePreview:
    """Return rows as Kedro-Viz takes them; nested values become text, as which it would show `[object Object]`."""
    table = json.loads(rows.to_json(orient="split"))
    table["data"] = [[_readable(value) for value in row] for row in table["data"]]
    return TablePreview(table)


def _readable(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
