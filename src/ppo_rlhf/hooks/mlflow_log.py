"""Sends metrics and samples to MLflow from a thread of its own, so that training never waits for the tracking store."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from ppo_rlhf.checkpoints.files import checkpoint_iterations
from ppo_rlhf.datasets.tracking_errors import one_line

logger = logging.getLogger(__name__)

NOT_METRICS = ("iteration", "step")
MOST_PER_BATCH = 1000


class MlflowLog:
    """Sends the metrics and samples of one run to MLflow; retries refused batches and sends no metric twice.

    MLflow's own asynchronous queue is not used, for two reasons. MLflow's queue does not report whether MLflow accepted
    a batch. A process that ends waits for MLflow's whole queue, which takes minutes per batch if the server hangs.
    `MlflowLog` makes one call at a time, in a daemon thread.
    """

    def __init__(self, run_id: str, *, is_continued: bool = False, checkpoints: Path | None = None) -> None:
        """Log to the MLflow run with the id `run_id`.

        `is_continued` is True if the MLflow run may already have metrics. `checkpoints` is the folder of the run's
        checkpoints, or None if the run cannot be resumed.
        """
        self._run_id, self._is_continued, self._checkpoints = run_id, is_continued, checkpoints
        self.repeated: tuple[str, ...] = ()
        self._client = MlflowClient()
        self._metrics: deque[Metric] = deque()
        self._samples: deque[Callable[[], object]] = deque()
        self._table: str | None = None if is_continued else "samples.json"
        self._sent: dict[str, set[int]] = {}
        self._refusal, self._is_gone = "", False
        self._thread: threading.Thread | None = None

    def log(self, values: Mapping[str, float], step: int, *, model_id: str | None = None) -> None:
        """Log one value for each key at `step`; `model_id` links the values to that logged model."""
        now = int(time.time() * 1000)
        self._metrics.extend(
            Metric(key, float(value), now, step, model_id=model_id, run_id=self._run_id)
            for key, value in values.items()
            if key not in NOT_METRICS
        )
        self._send()

    def log_samples(self, iteration: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Append the samples of one iteration to the run's table of samples. All columns have the same length.

        The table of samples is `samples.json`. A continued run begins a new table, `samples_from_<iteration>.json`,
        because a kill may have truncated the table of the interrupted run, and MLflow cannot append to a truncated
        table.
        """
        self._table = self._table or f"samples_from_{iteration}.json"
        length = len(next(iter(columns.values())))
        rows = {"iteration": [iteration] * length, **columns}
        self._samples.append(partial(self._client.log_table, self._run_id, rows, self._table))
        self._send()

    def log_page(self, page: str, path: str) -> None:
        """Log an HTML page of samples as the artifact at `path`, replacing an earlier page at `path`."""
        self._samples.append(partial(self._client.log_text, self._run_id, page, path))
        self._send()

    def flush(self, patience: float) -> bool:
        """Wait at most `patience` seconds for MLflow to accept all metrics and samples; return whether MLflow has them
        all.
        """
        end = time.monotonic() + patience
        # Send twice: MLflow may refuse a batch, and a metric may be logged just as the sending thread ends
        for _ in range(2):
            if self._metrics or self._samples:
                self._send().join(max(0.0, end - time.monotonic()))
        return not (self._metrics or self._samples)

    def close(self, patience: float) -> bool:
        """Flush for the last time, warn about data that MLflow refused, and return whether MLflow has all data."""
        if self.flush(patience):
            return True
        can_resume = self._checkpoints is not None and checkpoint_iterations(self._checkpoints) and not self._is_gone
        logger.warning(
            "MLflow did not accept %d metrics and %d samples of run %s: %s.%s",
            len(self._metrics),
            len(self._samples),
            self._run_id,
            self._refusal or "the tracking store does not answer",
            f" `--params resume={self._run_id}` sends the metrics." if can_resume else "",
        )
        return False

    def _send(self) -> threading.Thread:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="metrics to MLflow", daemon=True)
            self._thread.start()
        return self._thread

    def _work(self) -> None:
        try:
            while self._metrics:
                batch = [self._metrics[i] for i in range(min(MOST_PER_BATCH, len(self._metrics)))]
                missing = {(m.key, m.step): m for m in batch if m.step not in self._sent_steps(m.key)}
                if missing:
                    self._client.log_batch(self._run_id, metrics=[*missing.values()], synchronous=True)
                for metric in batch:
                    self._sent[metric.key].add(metric.step)
                    self._metrics.popleft()
            while self._samples:
                self._samples[0]()
                self._samples.popleft()
        except Exception as error:  # each kind of artifact store raises the errors of its own client library
            if not self._refusal:
                logger.warning("MLflow rejected metrics of run %s; retrying: %s", self._run_id, one_line(error))
            self._refusal = one_line(error).removesuffix(".")
            self._is_gone = getattr(error, "error_code", None) == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST)
        else:
            self._refusal, self._is_gone = "", False

    def _sent_steps(self, key: str) -> set[int]:
        """Return the steps for which MLflow already has the metric `key`."""
        if key not in self._sent:
            may_have = self._is_continued and not key.startswith(self.repeated)
            points = self._client.get_metric_history(self._run_id, key) if may_have else []
            self._sent[key] = {point.step for point in points}
        return self._sent[key]
