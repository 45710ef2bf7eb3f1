"""Marks runs whose process died silently, by SIGKILL or `os._exit`; MLflow would show such runs as RUNNING for ever."""

from __future__ import annotations

import logging
from pathlib import Path

import mlflow
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ppo_rlhf.hooks.run_description import CHECKPOINTS, RunDescription, place_of
from ppo_rlhf.runtime.locks import LOCK_FILE, is_let_go

logger = logging.getLogger(__name__)


def end_abandoned(this: RunDescription, experiment_id: str, resumed: str | None) -> None:
    """Mark as KILLED each RUNNING run of this project and host whose folder nobody locks, and its child runs.

    A run that makes no checkpoints never has a lock, so the status of a run without checkpoints stays unchanged. For
    the run with the id `resumed`, only child runs are marked as KILLED. A child run whose folder a process locks is
    still running and is not marked. The caller makes sure that no other run starts while `end_abandoned` works.
    """
    client = mlflow.MlflowClient()
    running = mlflow.search_runs([experiment_id], "attributes.status = 'RUNNING'", output_format="list")
    ended = {
        run.info.run_id: max(int(1000 * _folder(run).stat().st_mtime), run.info.start_time)
        for run in running
        if run.info.run_id != resumed and place_of(run.data.tags) == place_of(this.tags) and is_let_go(_folder(run))
    }
    for run_id, at in ended.items():
        client.set_terminated(run_id, "KILLED", at)
        logger.info("MLflow run %s died silently, by SIGKILL or os._exit: it is marked as KILLED now.", run_id)
    for run in running:
        parent, folder = run.data.tags.get(MLFLOW_PARENT_RUN_ID), _folder(run)
        if parent in {*ended, resumed} - {None} and (is_let_go(folder) or not (folder / LOCK_FILE).exists()):
            client.set_terminated(run.info.run_id, "KILLED", ended.get(parent))


def _folder(run: Run) -> Path:
    return Path(run.data.tags.get(CHECKPOINTS, ""), run.info.run_id)
