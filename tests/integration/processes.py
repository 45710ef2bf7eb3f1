"""`kedro run` in a process of its own, forked where everything that a run imports is imported already.

Imports are most of what a small run takes. Everything else is the command's: its process can be killed, holds its locks
and leaves its files. `fresh_kedro_run` begins with nothing, as in a shell. Both have one thread, so that sums round
alike in all of them.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

IMPORTED = (
    "ppo_rlhf",  # before torch, whose threads it sets up
    "accelerate",
    "datasets",
    "kedro.framework.cli.cli",
    "kedro_datasets.pandas",
    "kedro_datasets.plotly",
    "mlflow.transformers",
    "peft",
    "ppo_rlhf.pipelines.data_preparation.nodes",
    "ppo_rlhf.pipelines.evaluation.nodes",
    "ppo_rlhf.pipelines.ppo.nodes",
    "ppo_rlhf.pipelines.reporting.nodes",
    "ppo_rlhf.pipelines.reward_modelling.nodes",
    "ppo_rlhf.pipelines.supervised_finetuning.nodes",
    "ppo_rlhf.settings",
    "sqlalchemy.dialects.sqlite",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "trl",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TIMEOUT_S = 300
_one_at_a_time = threading.Lock()  # two threads that ask for one child's end at once: only one of them is told it


def kedro_run(project: Path, *arguments: str, watched: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `kedro run` with these arguments to its end; `watched` is the order that `watched_run.Watch` takes."""
    with tempfile.TemporaryDirectory() as folder:
        printed = tuple(Path(folder) / name for name in ("stdout", "stderr"))
        with _one_at_a_time:
            process = _forking().Process(target=_run, args=(project, arguments, watched, printed))
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        while (code := _exit_code(process)) is None:
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"kedro run {' '.join(arguments)}: no end after {TIMEOUT_S} s")
            time.sleep(0.05)
        stdout, stderr = (path.read_text() for path in printed)
    return subprocess.CompletedProcess(["kedro", "run", *arguments], code, stdout, stderr)


def fresh_kedro_run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does."""
    command = [sys.executable, "-m", "kedro", "run", *arguments]
    environment = {**os.environ, **ONE_THREAD}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@functools.cache
def _forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def _exit_code(process: multiprocessing.process.BaseProcess) -> int | None:
    with _one_at_a_time:
        return process.exitcode


def _run(project: Path, arguments: tuple[str, ...], watched: str | None, printed: tuple[Path, Path]) -> None:
    os.chdir(project)
    sys.argv = ["kedro", "run", *arguments]
    for descriptor, path in zip((1, 2), printed, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)

    from kedro.framework.cli.cli import KedroCLI

    import ppo_rlhf.settings as settings
    from tests.integration.watched_run import Watch

    if watched is not None:
        settings.HOOKS = (*settings.HOOKS, Watch(json.loads(watched)))
    KedroCLI(project)(["run", *arguments], prog_name="kedro")
