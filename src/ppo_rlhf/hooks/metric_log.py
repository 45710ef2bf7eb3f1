"""Metrics to MLflow without waiting for it."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric

from ppo_rlhf.hooks.background import Background
from ppo_rlhf.hooks.tracking_store import STORE_ERRORS, noting_refusals, one_line

logger = logging.getLogger(__name__)

MOST_PER_BATCH = 1000  # MLflow's limit
MOST_KEPT = 20_000
"""Metrics that wait for a server that does not take them; some 500 iterations, 10 MB."""
MOST_REFUSALS = 2
"""Of batches that are sent again, until the server is left alone: one that it never takes holds up no other."""
OF_THE_CLOCK = ("time/", "throughput/", "memory/")
"""Metrics that differ from process to process."""
BIT_IDENTICAL = "bit_identical"


class MetricLog:
    """Logs metrics of one run in the background, however long a server takes.

    What MLflow refuses is kept and sent again behind what it takes next. A run that goes on logs no step twice: a value
    that MLflow has already is compared with the new one, and stays.
    """

    def __init__(self, run_id: str, *, is_continued: bool = False) -> None:
        """Log to the MLflow run with this id; of one that is continued, read what it has.

        Raises:
            MlflowException: What it has cannot be read.
        """
        self._run_id = run_id
        self._client = MlflowClient()
        self._background = Background(self._deliver, name="metrics to MLflow")
        self._lock = threading.Lock()  # of the next three
        self._waiting: deque[list[Metric]] = deque()
        self._refused: deque[list[Metric]] = deque()
        self._lacking = 0  # metrics that MLflow does not have yet
        self._reason = "it does not answer"
        self._is_refusing = False
        self._differs = self._is_tagged = False
        self._known: dict[str, dict[int, float]] = {}
        if is_continued:
            for key in self._client.get_run(run_id).data.metrics:
                history = self._client.get_metric_history(run_id, key)
                self._known[key] = {metric.step: metric.value for metric in history}

    def log(
        self, metrics: Mapping[str, float], step: int, *, model_id: str | None = None, is_repeatable: bool = True
    ) -> None:
        """Log one value for each key at `step`; with `model_id` they are linked to that logged model.

        Args:
            metrics: Values by key.
            step: Where they lie.
            model_id: An MLflow logged model.
            is_repeatable: Whether a value that is there already must be equal.
        """
        missing = self._missing(metrics, step, is_repeatable)
        self._send([self._metric(key, value, step, model_id) for key, value in missing])

    def log_history(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Log a finished history: each row holds its `step` and the values of that step."""
        self._send(
            [
                self._metric(key, value, int(row["step"]), None)
                for row in rows
                for key, value in self._missing(row, int(row["step"]), is_repeatable=True)
                if key != "step"
            ]
        )

    def complete(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Log what MLflow lacks of rows that were measured earlier; each holds its `iteration`."""
        added = [
            self._metric(key, value, int(row["iteration"]), None)
            for row in rows
            for key, value in row.items()
            if key != "iteration" and int(row["iteration"]) not in self._known.get(key, {})
        ]
        for metric in added:
            self._known.setdefault(metric.key, {})[metric.step] = metric.value
        self._send(added)

    def flush(self, patience: float) -> bool:
        """Wait until MLflow was asked for everything, for so many seconds at most; what it refuses is kept.

        Returns:
            Whether it was, and refuses nothing.
        """
        self._background.wake()
        return self._background.wait(patience) and not self._is_refusing

    def close(self, patience: float) -> bool:
        """Flush for the last time; return whether MLflow has everything, and say what it does not have."""
        self.flush(patience)
        with self._lock:
            lacking = self._lacking
            self._waiting.clear()
            self._refused.clear()
        if lacking:
            logger.warning("MLflow lacks %d metrics of run %s, for: %s", lacking, self._run_id, self._reason)
        return not lacking

    def _missing(self, metrics: Mapping[str, float], step: int, is_repeatable: bool) -> Iterator[tuple[str, float]]:
        for key, value in metrics.items():
            before = self._known.get(key, {}).get(step)
            if before is None:
                yield key, value
            elif is_repeatable and not key.startswith(OF_THE_CLOCK) and not _is_same(before, value):
                self._note_difference(key, step, before, value)

    def _note_difference(self, key: str, step: int, before: float, now: float) -> None:
        if self._differs:
            return
        self._differs = True
        logger.warning(
            "This run does not repeat what it measured before it was interrupted: %s at step %d was %r and is %r now. "
            "What was logged first stays, and the run is tagged %s=false.",
            *(key, step, before, float(now), BIT_IDENTICAL),
        )

    def _metric(self, key: str, value: float, step: int, model_id: str | None) -> Metric:
        now = int(time.time() * 1000)
        return Metric(key, float(value), now, step, model_id=model_id, run_id=self._run_id)

    def _send(self, metrics: list[Metric]) -> None:
        with self._lock:
            self._waiting.extend(
                metrics[start : start + MOST_PER_BATCH] for start in range(0, len(metrics), MOST_PER_BATCH)
            )
            self._lacking += len(metrics)
        self._background.wake()

    def _deliver(self) -> None:
        """Send what waits, and if the server takes it what it refused before: in the background."""
        if self._differs and not self._is_tagged:
            with noting_refusals(f"{BIT_IDENTICAL}=false"):
                self._client.set_tag(self._run_id, BIT_IDENTICAL, "false")
            self._is_tagged = True
        is_answering = True
        while batch := self._next_of(self._waiting):
            is_answering = self._is_taken(batch)
        untried, refusals = len(self._refused) if is_answering else 0, 0
        while untried and refusals < MOST_REFUSALS and (batch := self._next_of(self._refused)):
            untried -= 1
            refusals += not self._is_taken(batch)
        if self._is_refusing and not self._refused:
            self._is_refusing = False
            logger.info("MLflow takes metrics again.")

    def _next_of(self, batches: deque[list[Metric]]) -> list[Metric] | None:
        with self._lock:
            return batches.popleft() if batches else None

    def _is_taken(self, batch: list[Metric]) -> bool:
        """Send one batch. A run of days does not end because its tracking server did; but it is said.

        MLflow drops what it has already: key, step, value and time are the same.
        """
        try:
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
        except STORE_ERRORS as error:
            self._keep(batch, one_line(error))
            return False
        with self._lock:
            self._lacking -= len(batch)
        return True

    def _keep(self, batch: list[Metric], reason: str) -> None:
        if not self._is_refusing:
            logger.warning("MLflow did not take metrics of run %s; they are sent again later: %s", self._run_id, reason)
        self._reason, self._is_refusing = reason, True
        with self._lock:
            self._refused.append(batch)
            kept = sum(map(len, [*self._refused, *self._waiting]))
            while kept > MOST_KEPT:
                kept -= len((self._refused or self._waiting).popleft())


def _is_same(before: float, now: float) -> bool:
    """Whether a value read from MLflow is this one: it stores infinities as the largest numbers, NaN as itself."""
    if math.isnan(now):
        return math.isnan(before)
    return before == now or (math.isinf(now) and before == math.copysign(sys.float_info.max, now))
