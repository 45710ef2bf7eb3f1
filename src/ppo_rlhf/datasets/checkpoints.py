"""Catalog entries for what one run saves while it trains, by MLflow run, and for the checkpoint it resumes from."""

import math
import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import mlflow
from kedro.io import AbstractDataset, DatasetError

from ppo_rlhf.checkpoints import evaluations
from ppo_rlhf.checkpoints.files import MANIFEST, checkpoint_iterations
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.names import RUN_ID
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.runtime.whole_files import process_name

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


class CheckpointDataset(_RunDataset[TrainingState, NoReturn]):
    """`<filepath>/<MLflow run id>/iteration_NNNNNN/`: written when due, the newest and the best kept.

    It is only written; `resume_checkpoint` reads them. Example:

    ```yaml
    checkpoint:
      type: ppo_rlhf.datasets.CheckpointDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: TrainingState) -> None:
        """Write a checkpoint if one is due, then delete those that are neither new nor the best."""
        if data.checkpoint_due:
            directory = run_directory(self.root)
            write_checkpoint(directory, data)
            evaluations.prune_run(directory, data.config, data.iteration)

    def load(self) -> NoReturn:
        raise DatasetError("checkpoint is only written; checkpoints are read by the entry `resume_checkpoint`.")

    def _exists(self) -> bool:
        return bool(checkpoint_iterations(run_directory(self.root)))


class ResumeCheckpointDataset(AbstractDataset[NoReturn, Path | None]):
    """The checkpoint that `resume` asks for, None for a run from the beginning.

    Which one that is depends on the runs in MLflow, so a hook resolves it before the first node and sets `checkpoint`.
    Without a hook a checkpoint's own path still works. Example:

    ```yaml
    resume_checkpoint:
      type: ppo_rlhf.datasets.ResumeCheckpointDataset
      filepath: data/06_models/ppo_checkpoints
      resume: ${runtime_params:resume, ${globals:resume}}
    ```
    """

    def __init__(self, filepath: str, resume: str | None = None, metadata: dict[str, Any] | None = None) -> None:
        """Describe what is asked for; nothing is read. `metadata` is read by Kedro-Viz."""
        self.root = Path(filepath)  # holds the checkpoints of all runs
        self.requested = None if resume is None else str(resume)  # `latest`, a checkpoint, or an MLflow run id
        self.checkpoint: Path | None = None  # what that is, once it is known
        self.metadata = metadata
        self._is_resolved = False

    def resolve(self, checkpoint: Path | None) -> None:
        """Set what the run resumes from; None starts at the beginning."""
        self.checkpoint, self._is_resolved = checkpoint, True

    def load(self) -> Path | None:
        """Return the checkpoint's directory.

        Raises:
            DatasetError: Only MLflow would know which one, and no hook has asked it.
        """
        if self._is_resolved or self.requested is None:
            return self.checkpoint
        path = Path(self.requested).expanduser()
        if not (path / MANIFEST).is_file():
            raise DatasetError(f"resume={self.requested}: without MLflow, give the directory of a checkpoint.")
        return path

    def save(self, data: NoReturn) -> None:
        raise DatasetError("resume_checkpoint is only read; checkpoints are written by the entry `checkpoint`.")

    def _exists(self) -> bool:
        return self.requested is not None

    def _describe(self) -> dict[str, Any]:
        return {"root": str(self.root), "resume": self.requested}


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
            evaluations.add_evaluation(run_directory(self.root), data)

    def load(self) -> list[dict[str, Any]]:
        """Return this run's evaluations, oldest first."""
        return evaluations.read_evaluations(run_directory(self.root))

    def _exists(self) -> bool:
        return (run_directory(self.root) / evaluations.EVALUATIONS).is_file()


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
        evaluations.write_completions(run_directory(self.root), data)

    def load(self) -> NoReturn:
        raise DatasetError("completions are only written: read the files by datasets.load_dataset.")

    def _exists(self) -> bool:
        return (run_directory(self.root) / evaluations.COMPLETIONS).is_dir()


def run_directory(root: Path) -> Path:
    """Return the directory of the MLflow run that is active; without one, a directory of this process.

    Of several processes only the main one has an MLflow run; a hook gives the others its id in the environment.
    """
    run = mlflow.active_run()
    run_id = run.info.run_id if run else None
    if not is_main_process():
        run_id = os.environ.get(RUN_ID)
    return root / (run_id or f"untracked-{process_name()}")
