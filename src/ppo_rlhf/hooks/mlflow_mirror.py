"""Mirrors a run's metrics.jsonl and samples in MLflow, from a thread, so that training never waits for MLflow.

The mirror keeps beside metrics.jsonl how far MLflow has its lines, and goes on from there after a refusal, an outage or
a resume. Each line has its own time, so MLflow's databases ignore a line that is sent again; a file store would keep
both copies. Lines whose sending was interrupted are therefore looked up in MLflow first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from ppo_rlhf.datasets.tracking_errors import one_line
from ppo_rlhf.runtime.metrics_file import METRICS, Line, Mark, read_lines
from ppo_rlhf.runtime.whole_files import replace_text

logger = logging.getLogger(__name__)

SENT = "mlflow.sent.json"
"""File beside metrics.jsonl that says how far MLflow has its lines."""
MOST_PER_BATCH = 1000


class MlflowMirror:
    """Sends the lines of one run's metrics.jsonl, and the files that belong to them, to MLflow.

    MLflow's own asynchronous queue is not used: it does not report whether MLflow accepted a batch, and a process that
    ends waits minutes for it if the server hangs. The mirror makes one call at a time, in a daemon thread.
    """

    def __init__(
        self,
        run_id: str,
        folder: Path,
        charts: Callable[[Line], Mapping[str, float]],
        send_files: Callable[[MlflowClient, Line], None],
    ) -> None:
        """Mirror the metrics.jsonl in `folder` in the MLflow run `run_id`.

        `charts` returns the metrics of a line that MLflow shows. `send_files` sends the files that belong to a line.
        """
        self._run_id, self._path, self._sent_path = run_id, folder / METRICS, folder / SENT
        self._charts, self._send_files = charts, send_files
        self._client = MlflowClient()
        self._metrics, self._files = Mark(), Mark()  # how far MLflow has the metrics, and the files
        # Kind, step and key of points that MLflow has, though their lines were set aside: the run that repeats them
        # sends no copy
        self._repeats: set[tuple[str, int, str]] = set()
        self._is_sure = True  # False: MLflow may have lines behind `_metrics`, whose sending was interrupted
        self._refusal, self._is_gone = "", False
        self._thread: threading.Thread | None = None
        if self._sent_path.is_file():
            self._is_sure = False
            # A loss of power may leave the file empty: then MLflow is sent everything again
            with suppress(ValueError):
                stored = json.loads(self._sent_path.read_bytes())
                self._metrics, self._files = Mark(**stored["metrics"]), Mark(**stored["files"])
                self._repeats = {(kind, step, key) for kind, step, key in stored["repeats"]}

    def cut(self, mark: Mark, anew: tuple[str, ...] = ()) -> None:
        """Prepare for a run that goes on behind `mark`; the lines behind it will be set aside.

        `anew` are the kinds of lines that MLflow gets again, because what they measure has changed.
        """
        self._look_up()
        for line in read_lines(self._path, mark):
            if line.end.bytes <= self._metrics.bytes:
                self._repeats |= {(line.kind, line.step, key) for key in self._charts(line)}
        self._repeats = {each for each in self._repeats if each[0] not in anew}
        self._metrics, self._files = min(self._metrics, mark), min(self._files, mark)
        self._write()

    def wake(self) -> threading.Thread:
        """Send what metrics.jsonl has and MLflow lacks, in a thread, which is returned."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="metrics to MLflow", daemon=True)
            self._thread.start()
        return self._thread

    def flush(self, patience: float) -> bool:
        """Wait at most `patience` seconds until MLflow has everything; return whether it has."""
        end = time.monotonic() + patience
        # Send twice: MLflow may refuse a batch, and a line may be written just as the sending thread ends
        for _ in range(2):
            if self._is_behind():
                self.wake().join(max(0.0, end - time.monotonic()))
        return not self._is_behind()

    def close(self, patience: float, *, can_resume: bool) -> bool:
        """Flush for the last time, warn about what MLflow lacks, and return whether it has everything."""
        # The sending thread may come to its end just after a `flush` that waited in vain
        if self.flush(patience) or not (lacking := list(self._behind())):
            return True
        logger.warning(
            "MLflow lacks %d lines of %s, from %s %d on, of run %s: %s.%s",
            len(lacking),
            self._path.name,
            lacking[0].kind,
            lacking[0].step,
            self._run_id,
            self._refusal or "the tracking store does not answer",
            f" `--params resume={self._run_id}` sends them." if can_resume and not self._is_gone else "",
        )
        return False

    def _behind(self) -> Iterator[Line]:
        return read_lines(self._path, min(self._metrics, self._files))

    def _is_behind(self) -> bool:
        return next(self._behind(), None) is not None

    def _work(self) -> None:
        try:
            if not self._is_sure:
                self._look_up()
            for batch, end in self._batches():
                self._is_sure = False
                if batch:
                    self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
                self._metrics, self._is_sure = end, True
                self._write()
            for line in read_lines(self._path, self._files):
                self._send_files(self._client, line)  # sending them again replaces them
                self._files = line.end
                self._write()
        except Exception as error:  # each kind of artifact store raises the errors of its own client library
            if not self._refusal:
                logger.warning("MLflow lacks metrics of run %s, and is asked again: %s", self._run_id, one_line(error))
            self._refusal = one_line(error).removesuffix(".")
            self._is_gone = getattr(error, "error_code", None) == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST)
        else:
            self._refusal, self._is_gone = "", False

    def _batches(self) -> Iterator[tuple[list[Metric], Mark]]:
        """Yield the metrics of whole lines that MLflow lacks, with the end of the last line."""
        batch: list[Metric] = []
        end = self._metrics
        for line in read_lines(self._path, self._metrics):
            points = self._lacking(line)
            if batch and len(batch) + len(points) > MOST_PER_BATCH:
                yield batch, end
                batch = []
            batch, end = batch + points, line.end
        if end != self._metrics:
            yield batch, end

    def _lacking(self, line: Line) -> list[Metric]:
        """Return a line's points, or none if MLflow has them from the line that this one repeats."""
        linked = {"run_id": self._run_id, "model_id": line.metrics.get(MODEL_ID)}
        return [
            Metric(key, float(value), line.time, line.step, **linked)
            for key, value in self._charts(line).items()
            if (line.kind, line.step, key) not in self._repeats
        ]

    def _look_up(self) -> None:
        """Skip the lines that MLflow has, though the process ended, or the call failed, before that was known.

        MLflow has a line if it has the line's last point.
        """
        known: dict[str, set[tuple[int, int]]] = {}
        for line in read_lines(self._path, self._metrics):
            if points := self._lacking(line):
                key = points[-1].key
                if key not in known:
                    found = self._client.get_metric_history(self._run_id, key)
                    known[key] = {(point.step, point.timestamp) for point in found}
                if (line.step, line.time) not in known[key]:
                    break
            self._metrics = line.end
        self._is_sure = True

    def _write(self) -> None:
        stored = {"metrics": asdict(self._metrics), "files": asdict(self._files), "repeats": sorted(self._repeats)}
        replace_text(self._sent_path, json.dumps(stored))


MODEL_ID = "model_id"
"""Key in a line's metrics with the id of the logged model that the line measures."""


def log_table(client: MlflowClient, run_id: str, table: Mapping[str, Any], path: str) -> None:
    """Log a table as the artifact at `path`, replacing an earlier one, and name it to MLflow's page.

    `table` has the keys `columns` and `data`. `MlflowClient.log_table` would append to an earlier table.
    """
    client.log_dict(run_id, dict(table), path)
    tag = client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")
    named = {"path": path, "type": "table"}
    if named not in (known := json.loads(tag)):
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*known, named]))
