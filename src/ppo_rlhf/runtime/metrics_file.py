"""metrics.jsonl: the metrics of a run, one line for each iteration, evaluation or step of a stage, in the run's folder.

The file is the only record of a run's metrics: checkpoints store its length, and all other forms are read from it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime.whole_files import written_whole

METRICS = "metrics.jsonl"
SET_ASIDE = "metrics.attempt_{:03d}.jsonl"
"""File with the lines of an earlier attempt, which the run that resumed from before them did not take over."""
ITERATION, EVALUATION = "iteration", "evaluation"
"""Kinds of lines. Each stage before PPO has a kind of its own, such as `sft`."""
_DIGEST = ', "sha256": "'


@dataclass(frozen=True, order=True)
class Mark:
    """A length of the file: the bytes up to the end of a line, and the digest of that line. Shorter ones are less."""

    bytes: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Line:
    """One line of the file.

    Attributes:
        kind: What was measured.
        step: The iteration, or the step of a stage.
        time: When the line was written, in milliseconds since 1970.
        metrics: The metrics by key.
        end: The length of the file up to the end of this line.
    """

    kind: str
    step: int
    time: int
    metrics: dict[str, Any]
    end: Mark


def read_lines(path: Path, after: Mark | None = None) -> Iterator[Line]:
    """Yield the complete lines of the file at `path`, those behind `after`; none if there is no file.

    Each line is checked against its SHA-256, which includes that of the line before. The last line is left out while it
    has no end, as a kill leaves it.

    Raises:
        CheckpointError: A line is damaged, or does not continue the line before it.
    """
    end = after or Mark()
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(end.bytes)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                body, _, digest = raw.decode().rstrip("\n").rpartition(_DIGEST)
                if digest != f'{_digest(end.sha256, body)}"}}':
                    raise ValueError("the line differs from its SHA-256")
                content = json.loads(f"{body}}}")
            except ValueError as error:
                raise CheckpointError(
                    f"{path}: damaged behind byte {end.bytes} ({error}). Restore the file; without its metrics the run "
                    "cannot go on"
                ) from None
            end = Mark(end.bytes + len(raw), digest[:-2])
            yield Line(content["kind"], content["step"], content["time"], content["metrics"], end)


def _as_number(value: Any) -> Any:
    return value.item()  # of NumPy or torch


def _digest(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}{body}".encode()).hexdigest()


class MetricsFile:
    """Writes a run's metrics.jsonl; one process writes, any process may read.

    Attributes:
        path: The path of the file.
    """

    def __init__(self, folder: Path) -> None:
        """Continue the file in `folder`, behind its last complete line; the first line creates file and folder."""
        self.path = folder / METRICS
        self._end, self._iterations = Mark(), 0
        self._evaluations: dict[int, dict[str, Any]] = {}

    def append(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line, whose metrics are numbers, texts or lists of numbers.

        Raises:
            CheckpointError: The line cannot be written, and the file is as before; or the file is damaged.
        """
        self._follow()
        now, row = time.time_ns() // 1_000_000, dict(metrics)
        body = json.dumps({"kind": kind, "step": step, "time": now, "metrics": row}, default=_as_number)[:-1]
        digest = _digest(self._end.sha256, body)
        raw = f'{body}{_DIGEST}{digest}"}}\n'.encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.truncate(self._end.bytes)  # a kill may have left a part of a line
                if file.write(raw) < len(raw):  # what fits on a full disk is no line
                    file.truncate(self._end.bytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._take(Line(kind, step, now, row, Mark(self._end.bytes + len(raw), digest)))

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        """Write an evaluation, unless the file has it: a resumed run repeats the evaluation of its checkpoint."""
        self._follow()
        step = int(row["iteration"])
        if json.dumps(self._evaluations.get(step)) != json.dumps(dict(row), default=_as_number):
            self.append(EVALUATION, step, row)

    def catch_up(self, history: list[dict[str, float]]) -> None:
        """Write the iterations of a run's history that the file lacks."""
        self._follow()
        for row in history[self._iterations :]:
            self.append(ITERATION, int(row["iteration"]), row)

    def mark(self) -> Mark:
        """Return the length of the file, once all of it is on the disk."""
        self._follow()
        if self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return self._end

    def cut(self, mark: Mark) -> None:
        """Go on behind `mark`, the length that a checkpoint stores. What is behind it becomes a file of its own.

        Raises:
            CheckpointError: The file is damaged, or is not the one that the checkpoint's run wrote.
        """
        content = self.path.read_bytes() if self.path.is_file() else b""
        known = list(read_lines_until(self.path, mark))
        if content[mark.bytes :]:
            number = 1
            while (aside := self.path.with_name(SET_ASIDE.format(number))).exists():
                number += 1
            with written_whole(aside) as draft:
                draft.write_bytes(content[mark.bytes :])
            os.truncate(self.path, mark.bytes)
        self._end, self._iterations, self._evaluations = Mark(), 0, {}
        for line in known:
            self._take(line)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of the evaluations so far, oldest first. Of two of one iteration the newer counts."""
        self._follow()
        return [{**self._evaluations[step]} for step in sorted(self._evaluations)]

    def _follow(self) -> None:
        """Read the lines that another process has written meanwhile."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < self._end.bytes:
            raise CheckpointError(f"{self.path}: damaged; it had {self._end.bytes} bytes, and has {size}")
        if size > self._end.bytes:
            for line in read_lines(self.path, self._end):
                self._take(line)

    def _take(self, line: Line) -> None:
        self._end = line.end
        self._iterations += line.kind == ITERATION
        if line.kind == EVALUATION:
            self._evaluations[line.step] = line.metrics


def metrics_of(folder: Path) -> MetricsFile:
    """Return this process's one writer and reader of a run's metrics.jsonl; `folder` is the run's folder."""
    return _metrics_of(os.path.abspath(folder))


@cache
def _metrics_of(folder: str) -> MetricsFile:
    return MetricsFile(Path(folder))


def read_lines_until(path: Path, mark: Mark) -> Iterator[Line]:
    """Yield the lines before `mark`, the length that a checkpoint stores.

    Raises:
        CheckpointError: The file is missing or damaged, or is not the one that the checkpoint's run wrote.
    """
    end = Mark()
    for line in read_lines(path):
        if line.end.bytes > mark.bytes:
            break
        end = line.end
        yield line
    if end != mark:
        raise CheckpointError(
            f"{path}: is not the file that the checkpoint's run wrote, whose first {mark.bytes} bytes belong to the "
            "checkpoint. Give the checkpoint in the folder of its own run, with that file"
        )
