"""Metrics and samples to MLflow, sent by a thread so that training never waits for the store."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric

from ppo_rlhf.hooks.tracking_store import one_line

logger = logging.getLogger(__name__)

SCORES = "objective/scores"
NOT_METRICS = ("iteration", "step")
MOST_PER_BATCH = 1000
"""Metrics that MLflow takes in one call."""
SILENT_S = 2.0
"""A wait for the store that takes longer is logged."""
TABLE = "samples.json"


@dataclass(frozen=True)
class _Row:
    key: str
    """A metric of each row of its kind: the row is in MLflow if this key has its step."""
    step: int
    metrics: list[Metric]


@dataclass(frozen=True)
class _Samples:
    iteration: int
    columns: Mapping[str, Sequence[object]]


class MlflowLog:
    """Sends the metrics and samples of one run to MLflow, in order; keeps refused ones and sends them again.

    MLflow's own asynchronous queue is not used: it does not say whether a batch was taken, and a process that ends
    waits for all of the queue, which takes minutes for each batch of a server that hangs. Here one call at most is
    under way, in a daemon thread. A run that continues sends only the steps that MLflow lacks.
    """

    def __init__(self, run_id: str, *, is_continued: bool = False) -> None:
        """Log to the MLflow run with this id; `is_continued` if it may have metrics already."""
        self._run_id, self._is_continued = run_id, is_continued
        self._client = MlflowClient()
        self._waiting: deque[_Row | _Samples] = deque()
        self._refusal = ""
        self._steps: dict[str, set[int]] = {}
        self._table = TABLE
        self._sampled: set[int] | None = None if is_continued else set()
        self._thread: threading.Thread | None = None

    def log(self, values: Mapping[str, float], step: int, *, model_id: str | None = None) -> None:
        """Log one value for each key at `step`; with `model_id` they are linked to that logged model."""
        now = int(time.time() * 1000)
        metrics = [
            Metric(key, float(value), now, step, model_id=model_id, run_id=self._run_id)
            for key, value in values.items()
            if key not in NOT_METRICS
        ]
        if metrics:
            keys = [metric.key for metric in metrics]
            self._waiting.append(_Row(SCORES if SCORES in keys else keys[0], step, metrics))
            self._send()

    def log_samples(self, iteration: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Add an iteration's samples, columns of equal length, to the table `samples.json`."""
        length = len(next(iter(columns.values())))
        self._waiting.append(_Samples(iteration, {"iteration": [iteration] * length, **columns}))
        self._send()

    def flush(self, patience: float) -> bool:
        """Wait for MLflow to take everything, for so many seconds at most; return whether it has."""
        end = time.monotonic() + patience
        self._join(end)
        if self._waiting:  # refused, or logged as the thread ended: once more
            self._send()
            self._join(end)
        return not self._waiting

    def close(self, patience: float) -> bool:
        """Flush for the last time; log what MLflow lacks, and return whether it has everything."""
        if self.flush(patience):
            return True
        rows = [entry for entry in list(self._waiting) if isinstance(entry, _Row)]
        logger.warning(
            "MLflow lacks %d metrics and %d samples of run %s: %s. `--params resume=%s` sends the metrics.",
            *(sum(len(row.metrics) for row in rows), len(self._waiting) - len(rows)),
            *(self._run_id, self._refusal or "it does not answer", self._run_id),
        )
        return False

    def _join(self, end: float) -> None:
        if self._thread is None:
            return
        self._thread.join(min(SILENT_S, max(0.0, end - time.monotonic())))
        remaining = end - time.monotonic()
        if self._thread.is_alive() and remaining > 0:
            logger.info("Waiting for MLflow to take metrics, for %.0f s at most.", remaining)
            self._thread.join(remaining)

    def _send(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="metrics to MLflow", daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        try:
            while self._waiting:
                entries = self._next()
                if isinstance(entries[0], _Samples):
                    self._send_samples(entries[0])
                else:
                    self._send_rows([row for row in entries if isinstance(row, _Row)])
                for _ in entries:
                    self._waiting.popleft()
        except Exception as error:  # artifact stores raise their own libraries' errors
            if not self._refusal:
                logger.warning(
                    "MLflow refuses metrics of run %s; they are sent again: %s", self._run_id, one_line(error)
                )
            self._refusal = one_line(error)
            return
        if self._refusal:
            self._refusal = ""
            logger.info("MLflow takes metrics again.")

    def _next(self) -> list[_Row | _Samples]:
        """Return the samples that are due, or as many rows as fit into one call; they stay in the queue."""
        entries: list[_Row | _Samples] = []
        room = MOST_PER_BATCH
        for entry in list(self._waiting):
            if isinstance(entry, _Samples):
                return entries or [entry]
            room -= len(entry.metrics)
            if entries and room < 0:
                break
            entries.append(entry)
        return entries

    def _send_rows(self, rows: list[_Row]) -> None:
        metrics = [metric for row in rows if row.step not in self._known_steps(row.key) for metric in row.metrics]
        for start in range(0, len(metrics), MOST_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MOST_PER_BATCH], synchronous=True)

    def _known_steps(self, key: str) -> set[int]:
        """Return the steps that MLflow had of a metric before this process logged any."""
        if key not in self._steps:
            points = self._client.get_metric_history(self._run_id, key) if self._is_continued else []
            self._steps[key] = {point.step for point in points}
        return self._steps[key]

    def _send_samples(self, samples: _Samples) -> None:
        if self._sampled is None:
            self._sampled = self._sampled_iterations(samples.iteration)
        if samples.iteration not in self._sampled:
            self._client.log_table(self._run_id, dict(samples.columns), self._table)

    def _sampled_iterations(self, iteration: int) -> set[int]:
        """Return the iterations of the table in MLflow; leave one that a kill cut off, and begin another one."""
        if TABLE not in [file.path for file in self._client.list_artifacts(self._run_id)]:
            return set()
        try:
            table = json.loads(mlflow.artifacts.load_text(f"runs:/{self._run_id}/{TABLE}"))
            column = table["columns"].index("iteration")
            return {row[column] for row in table["data"]}
        except (ValueError, KeyError):
            self._table = f"samples_from_{iteration}.json"
            logger.warning("%s of MLflow run %s is damaged; samples go to %s.", TABLE, self._run_id, self._table)
            return set()
