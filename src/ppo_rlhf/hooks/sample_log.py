"""Samples to MLflow as tables of bounded size: one more costs as much after a thousand iterations as at first."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from mlflow import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
from mlflow.utils.uri import is_local_uri
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from ppo_rlhf.hooks.tracking_store import STORE_ERRORS, one_line

logger = logging.getLogger(__name__)

FIRST_TABLE = "samples.json"
ITERATIONS_PER_TABLE = 50
_TABLE = re.compile(r"samples(?:_from_(\d+))?\.json")

Rows = dict[str, list[object]]


class SampleLog:
    """Tables of samples in one run: `samples.json`, and after 50 sampled iterations `samples_from_<iteration>.json`, ….

    The newest table is kept in memory and written anew with each sample; `mlflow.log_table` would read it back first.
    Older ones are not touched again. A run that goes on does not log an iteration again.
    """

    def __init__(self, run_id: str, *, is_continued: bool = False) -> None:
        """Log to the MLflow run with this id; of one that is continued, read what it has.

        Raises:
            MlflowException: What it has cannot be read.
        """
        self._run_id = run_id
        self._client = MlflowClient()
        self._artifacts = self._client.get_run(run_id).info.artifact_uri
        self._name = ""
        self._rows: Rows = {}
        self._iterations: list[int] = []
        self._older: set[int] = set()
        self._is_torn = False
        self._is_registered = False
        self._is_refused = False
        if is_continued:
            self._read_tables()

    def log(self, iteration: int, table: Mapping[str, Sequence[object]]) -> None:
        """Add an iteration's samples, columns of equal length. What the store refuses is written with the next ones."""
        if iteration in self._older or iteration in self._iterations:
            return
        if not self._name or self._is_torn or len(self._iterations) >= ITERATIONS_PER_TABLE:
            self._begin_table(iteration)
        length = len(next(iter(table.values()), ()))
        for column, values in {"iteration": [iteration] * length, **table}.items():
            self._rows.setdefault(column, []).extend(values)
        self._iterations.append(iteration)
        try:
            self._write()
        except STORE_ERRORS as error:
            if not self._is_refused:
                logger.warning("MLflow did not take the samples of iteration %d: %s", iteration, one_line(error))
            self._is_refused = True
        else:
            self._is_refused = False

    def _begin_table(self, iteration: int) -> None:
        self._older.update(self._iterations)
        self._name = f"samples_from_{iteration}.json" if self._name else FIRST_TABLE
        self._rows, self._iterations = {}, []
        self._is_torn = self._is_registered = False

    def _write(self) -> None:
        text = pd.DataFrame(self._rows).to_json(orient="split", index=False)
        if is_local_uri(self._artifacts):
            folder = Path(local_file_uri_to_path(self._artifacts))
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{self._name}.tmp"
            temporary.write_text(text)
            os.replace(temporary, folder / self._name)  # whole, or as it was
        else:
            self._client.log_text(self._run_id, text, self._name)
        if not self._is_registered:
            self._register()
            self._is_registered = True

    def _register(self) -> None:
        """Name the table in the tag by which MLflow's pages and `mlflow.load_table` find it."""
        tables = json.loads(self._client.get_run(self._run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        entry = {"path": self._name, "type": "table"}
        value = json.dumps([*tables, entry])
        if entry not in tables and len(value) <= MAX_TAG_VAL_LENGTH:  # a longer one would be cut off, and be no JSON
            self._client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, value)

    def _read_tables(self) -> None:
        """Learn which iterations are logged, and go on in the newest table if it is whole."""
        matches = [_TABLE.fullmatch(artifact.path) for artifact in self._client.list_artifacts(self._run_id)]
        names = {int(match[1] or 0): match[0] for match in matches if match}
        for start in sorted(names):
            self._older.update(self._iterations)
            self._name, self._rows, self._iterations = names[start], self._read(names[start]), []
            self._iterations = sorted({int(str(iteration)) for iteration in self._rows.get("iteration", [])})
        self._is_torn = bool(names) and not self._iterations

    def _read(self, name: str) -> Rows:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(self._client.download_artifacts(self._run_id, name, folder))
            try:
                table = json.loads(path.read_text())
                columns = list(zip(*table["data"], strict=True)) or [()] * len(table["columns"])
                return {str(column): list(values) for column, values in zip(table["columns"], columns, strict=True)}
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s of MLflow run %s is damaged and left as it is: %s", name, self._run_id, error)
                return {}
