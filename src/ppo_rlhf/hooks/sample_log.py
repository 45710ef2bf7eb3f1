"""Samples to MLflow as tables of bounded size: one more costs as much after a thousand iterations as at first."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from mlflow import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS
from mlflow.utils.uri import is_local_uri
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from ppo_rlhf.hooks.background import Background
from ppo_rlhf.hooks.tracking_store import one_line

logger = logging.getLogger(__name__)

FIRST_TABLE = "samples.json"
ITERATIONS_PER_TABLE = 50
MOST_REFUSALS = 2
"""Of tables, until the store is left alone: one that it never takes holds up no other."""
_TABLE = re.compile(r"samples(?:_from_(\d+))?\.json")

Rows = dict[str, list[object]]


class SampleLog:
    """Tables of samples in one run: `samples.json`, and after 50 sampled iterations `samples_from_<iteration>.json`, ….

    The newest table is kept in memory and written anew with each sample, in the background; `mlflow.log_table` would
    read it back first. Older ones are not touched again. A run that goes on does not log an iteration again.
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
        self._background = Background(self._write_due, name="samples to MLflow")
        self._lock = threading.Lock()
        self._due: dict[str, str] = {}  # by name, what tables that MLflow does not have yet are to hold
        self._registered: set[str] = set()
        self._is_refused = False
        if is_continued:
            self._read_tables()

    def log(self, iteration: int, table: Mapping[str, Sequence[object]]) -> None:
        """Add an iteration's samples, columns of equal length."""
        if iteration in self._older or iteration in self._iterations:
            return
        if not self._name or self._is_torn or len(self._iterations) >= ITERATIONS_PER_TABLE:
            self._begin_table(iteration)
        length = len(next(iter(table.values()), ()))
        for column, values in {"iteration": [iteration] * length, **table}.items():
            self._rows.setdefault(column, []).extend(values)
        self._iterations.append(iteration)
        with self._lock:
            self._due[self._name] = pd.DataFrame(self._rows).to_json(orient="split", index=False)
        self._background.wake()

    def close(self, patience: float) -> bool:
        """Wait until everything is written, for so many seconds at most; return whether it is, and say what is not."""
        self._background.wake()
        self._background.wait(patience)
        with self._lock:
            lacking = list(self._due)
            self._due.clear()
        if lacking:
            logger.warning("MLflow lacks samples of run %s: %s", self._run_id, ", ".join(lacking))
        return not lacking

    def _begin_table(self, iteration: int) -> None:
        self._older.update(self._iterations)
        self._name = f"samples_from_{iteration}.json" if self._name else FIRST_TABLE
        self._rows, self._iterations = {}, []
        self._is_torn = False

    def _write_due(self) -> None:
        """Write the tables that wait; what the store refuses waits on, and the first time it is said."""
        untried, refusals = len(self._due), 0
        while untried and refusals < MOST_REFUSALS and (table := self._next_table()):
            untried -= 1
            name, text = table
            try:
                self._write(name, text)
            except Exception as error:  # artifact stores raise what their own libraries do
                if not self._is_refused:
                    logger.warning("MLflow did not take %s, which is written again later: %s", name, one_line(error))
                self._is_refused = True
                self._put_behind(name)
                refusals += 1
                continue
            with self._lock:
                if self._due.get(name) == text:
                    del self._due[name]
        self._is_refused = refusals > 0

    def _next_table(self) -> tuple[str, str] | None:
        with self._lock:
            return next(iter(self._due.items()), None)

    def _put_behind(self, name: str) -> None:
        """Let the tables that wait go first."""
        with self._lock:
            if name in self._due:
                self._due[name] = self._due.pop(name)

    def _write(self, name: str, text: str) -> None:
        if is_local_uri(self._artifacts):
            folder = Path(local_file_uri_to_path(self._artifacts))
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{name}.tmp"
            temporary.write_text(text)
            os.replace(temporary, folder / name)  # whole, or as it was
        else:
            self._client.log_text(self._run_id, text, name)
        if name not in self._registered:
            self._register(name)
            self._registered.add(name)

    def _register(self, name: str) -> None:
        """Name the table in the tag by which MLflow's pages and `mlflow.load_table` find it."""
        tables = json.loads(self._client.get_run(self._run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        entry = {"path": name, "type": "table"}
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
