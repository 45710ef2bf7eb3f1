"""The pipe between compare.py and its workers, one JSON object a line. Only the standard library is used.

A worker answers each `run` with the figures of one iteration and sleeps in between; it ends when the pipe closes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from speed import GIVEN

HERE = Path(__file__).resolve().parent.parent
SPIN = "3000"  # as the package: OpenMP's threads sleep soon, and a waiting worker takes nothing from the working one


class Channel:
    """The worker's end. Whatever a library prints goes to stderr instead."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Sleep until the next command; False when there will be none."""
        return bool(sys.stdin.readline())

    def send(self, **reply: Any) -> None:
        """Answer."""
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


class WorkerError(RuntimeError):
    """A worker ended before it should."""


class Worker:
    """The parent's end of one worker process."""

    def __init__(self, python: str, module: str, job: Path, **environment: str) -> None:
        """Start `python -m module JOB`; `ready` waits for it."""
        path = os.pathsep.join(filter(None, [str(HERE), GIVEN.get("PYTHONPATH")]))
        self._name = f"{module} ({python})"
        self._errors = job.with_name(f"{job.stem}.{module}.log")
        with self._errors.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, "-m", module, str(job)],
                env={**GIVEN, "GOMP_SPINCOUNT": SPIN, **environment, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ready(self) -> dict[str, Any]:
        """Wait until the worker has loaded its models; return what it says of itself."""
        return self._reply()

    def run(self) -> dict[str, Any]:
        """Let the worker do one piece of work and return its figures."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._failure()) from None
        return self._reply()

    def close(self) -> None:
        """Let the worker end; one that does not within a minute is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._failure())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self) -> str:
        self._process.wait()
        said = self._errors.read_text(encoding="utf-8", errors="replace")[-4000:]
        return f"{self._name} ended with status {self._process.returncode}:\n{said}"


def peak_memory_mib() -> float:
    """Return the most memory that this process has had resident.

    Linux counts it by program (VmHWM); `getrusage` there starts at what the parent had when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
