"""Marks runs whose process died silently, by SIGKILL or `os._exit`; MLflow would show such runs as RUNNING for ever."""

from __future__ import annotations

import logging
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ppo_rlhf.hooks.run_record import run_folder
from ppo_rlhf.runtime.locks import is_let_go

logger = logging.getLogger(__name__)


def end_abandoned(project: Path, experiment_id: str, resumed: str | None) -> None:
    """Mark as KILLED each RUNNING run with a folder in this project that no process locks, and its child runs.

    A host name, a path or a process id cannot tell, as two containers may share all three. For the run with the id
    `resumed`, only child runs are marked as KILLED. A child run with a folder of its own is judged by its own lock. The
    caller makes sure that no other run starts while `end_abandoned` works.
    """
    client = mlflow.MlflowClient()
    running = mlflow.search_runs([experiment_id], "attributes.status = 'RUNNING'", output_format="list")
    folders = {run.info.run_id: _folder(run, project) for run in running}
    ended = {
        run.info.run_id: max(int(1000 * folder.stat().st_mtime), run.info.start_time)
        for run in running
        if run.info.run_id != resumed and (folder := folders[run.info.run_id]) and is_let_go(folder)
    }
    for run_id, at in ended.items():
        client.set_terminated(run_id, "KILLED", at)
        logger.info("MLflow run %s died silently, by SIGKILL or os._exit: it is marked as KILLED now.", run_id)
    for run in running:
        parent = run.data.tags.get(MLFLOW_PARENT_RUN_ID)
        if parent in {*ended, resumed} - {None} and folders[run.info.run_id] is None:
            client.set_terminated(run.info.run_id, "KILLED", ended.get(parent))


def _folder(run: Run, project: Path) -> Path | None:
    folder = run_folder(run, project)
    return folder if folder is not None and folder.is_dir() else None
