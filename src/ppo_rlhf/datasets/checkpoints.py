"""Catalog entries for what one run saves while it trains: its checkpoints and its evaluations, by MLflow run."""

import math
import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import mlflow
from kedro.io import AbstractDataset, DatasetError

from ppo_rlhf.checkpoints import records
from ppo_rlhf.checkpoints.files import checkpoint_iterations
from ppo_rlhf.checkpoints.store import CheckpointRequest, write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.names import RUN_ID
from ppo_rlhf.processes import is_main_process
from ppo_rlhf.whole_files import process_name

Saved = TypeVar("Saved")
Loaded = TypeVar("Loaded")


class _RunDataset(AbstractDataset[Saved, Loaded]):
    """A dataset below the directory that holds the checkpoints of all runs."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self.root = Path(filepath)
        self.metadata = metadata

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self.root)}


def most_checkpoints(config: PPOConfig, iterations: int) -> int:
    """Return how many checkpoints a run has on the disk at most: the newest, the best, and one being written."""
    return min(config.save_total_limit + 1, math.ceil(iterations / config.save_interval)) + 1


class CheckpointDataset(_RunDataset[CheckpointRequest, NoReturn]):
    """`<filepath>/<MLflow run id>/iteration_NNNNNN/`: written when due, the newest and the best kept.

    It is only written; `resume_checkpoint` reads them. Example:

    ```yaml
    checkpoint:
      type: ppo_rlhf.datasets.CheckpointDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: CheckpointRequest) -> None:
        """Write a checkpoint if one is due, then delete those that are neither new nor the best."""
        if data.due:
            directory = run_directory(self.root)
            write_checkpoint(directory, data.state)
            records.prune_run(directory, data.state.config, data.state.iteration)

    def load(self) -> NoReturn:
        raise DatasetError("checkpoint is only written; checkpoints are read by the entry `resume_checkpoint`.")

    def _exists(self) -> bool:
        return bool(checkpoint_iterations(run_directory(self.root)))


class EvaluationLogDataset(_RunDataset[dict[str, Any], list[dict[str, Any]]]):
    """The evaluations of this run, one row each, beside its checkpoints: they decide which checkpoint is the best.

    A row has the metrics, and what a later evaluation or the choice of the best checkpoint needs beside them.
    Saving appends one row; an empty dict (no evaluation was due) changes nothing. Example:

    ```yaml
    evaluation_metrics:
      type: ppo_rlhf.datasets.EvaluationLogDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: dict[str, Any]) -> None:
        """Append one evaluation; one of the same iteration is replaced."""
        if data:
            records.add_evaluation(run_directory(self.root), data)

    def load(self) -> list[dict[str, Any]]:
        """Return this run's evaluations, oldest first."""
        return records.read_evaluations(run_directory(self.root))

    def _exists(self) -> bool:
        return (run_directory(self.root) / records.EVALUATIONS).is_file()


class CompletionsDataset(_RunDataset[list[dict[str, Any]], NoReturn]):
    """The completions of this run's sampled iterations, beside its checkpoints; only written. Example:

    ```yaml
    completions:
      type: ppo_rlhf.datasets.CompletionsDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: list[dict[str, Any]]) -> None:
        """Write one iteration's file; no rows: nothing was due."""
        records.write_completions(run_directory(self.root), data)

    def load(self) -> NoReturn:
        raise DatasetError("completions are only written: read the files by datasets.load_dataset.")

    def _exists(self) -> bool:
        return (run_directory(self.root) / records.COMPLETIONS).is_dir()


def run_directory(root: Path) -> Path:
    """Return the directory of the MLflow run that is active; without one, a directory of this process.

    Of several processes only the main one has an MLflow run; a hook gives the others its id in the environment.
    """
    run = mlflow.active_run()
    run_id = run.info.run_id if run else None
    if not is_main_process():
        run_id = os.environ.get(RUN_ID)
    return root / (run_id or f"untracked-{process_name()}")
