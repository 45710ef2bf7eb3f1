"""Runs whose process has ended without a word, by SIGKILL or `os._exit`: MLflow would call them RUNNING for ever."""

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
    """Mark as KILLED the runs of this project and host that hold no lock on their folder, and those below them.

    Runs that make no checkpoints have no lock and stay as they are. Of the run that is resumed now, only those below it
    are marked; one below that holds a lock of its own is running. No other run may start meanwhile.
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
        logger.info("MLflow run %s ended without a word, by SIGKILL or os._exit: it is marked as KILLED now.", run_id)
    for run in running:
        parent, own = run.data.tags.get(MLFLOW_PARENT_RUN_ID), _folder(run)
        if parent in {*ended, resumed} - {None} and (is_let_go(own) or not (own / LOCK_FILE).exists()):
            client.set_terminated(run.info.run_id, "KILLED", ended.get(parent))


def _folder(run: Run) -> Path:
    return Path(run.data.tags.get(CHECKPOINTS, ""), run.info.run_id)
