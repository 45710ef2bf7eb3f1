"""Catalog entries for the files that a run saves during training, and for the checkpoint that a run resumes from."""

import math
import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import mlflow
from kedro.io import AbstractDataset, DatasetError

from ppo_rlhf.checkpoints import evaluations
from ppo_rlhf.checkpoints.files import checkpoint_iterations
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.manifests import MANIFEST
from ppo_rlhf.runtime.metrics_file import METRICS, metrics_of
from ppo_rlhf.runtime.names import RUN_ID, untracked
from ppo_rlhf.runtime.processes import is_main_process

Saved = TypeVar("Saved")
Loaded = TypeVar("Loaded")


class RunDataset(AbstractDataset[Saved, Loaded]):
    """A dataset whose `filepath` is the directory with the checkpoints of all runs."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self.root = Path(filepath)
        self.folder: Path | None = None  # the directory of the run that has the dataset, which `RunCatalog` sets
        self.metadata = metadata

    @property
    def written(self) -> Path:
        """The directory that a run writes to."""
        return self.folder or run_directory(self.root)

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self.root)}


def most_checkpoints(config: PPOConfig, iterations: int, keeps_best: bool = False) -> int:
    """Return the largest number of checkpoints that a run has on disk at once.

    `keeps_best` is True with `evaluation.on_exploitation=stop`, which also keeps the best evaluation, or the start.
    """
    at_intervals = math.ceil(iterations / config.save_interval)
    saved = at_intervals if config.save_interval_minutes is None else iterations
    return min(config.save_total_limit + 1, saved) + keeps_best + 1


class CheckpointDataset(RunDataset[TrainingState, NoReturn]):
    """Writes the checkpoints `<filepath>/<MLflow run id>/iteration_NNNNNN/`, and keeps the newest and the best.

    The catalog entry `checkpoint` cannot be loaded; the catalog entry `resume_checkpoint` reads checkpoints. Example:

    ```yaml
    checkpoint:
      type: ppo_rlhf.datasets.CheckpointDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: TrainingState) -> None:
        """Write a checkpoint, then delete all checkpoints except the newest and the best."""
        directory = self.written
        write_checkpoint(directory, data)
        evaluations.prune_run(directory, data.config, data.progress.best_evaluation)

    def load(self) -> NoReturn:
        raise DatasetError("checkpoint is only written; checkpoints are read by the entry `resume_checkpoint`.")

    def _exists(self) -> bool:
        return bool(checkpoint_iterations(self.written))


class ResumeCheckpointDataset(AbstractDataset[NoReturn, Path | None]):
    """The checkpoint that the setting `resume` names; None for a run that starts at the beginning.

    `resume` may refer to a run in MLflow, so a hook calls `resolve` before the first node. If no hook has called
    `resolve`, `resume` can only be the path of a checkpoint. Example:

    ```yaml
    resume_checkpoint:
      type: ppo_rlhf.datasets.ResumeCheckpointDataset
      filepath: data/06_models/ppo_checkpoints
      resume: ${runtime_params:resume, ${globals:resume}}
    ```
    """

    def __init__(self, filepath: str, resume: str | None = None, metadata: dict[str, Any] | None = None) -> None:
        """Store the arguments without reading a file. `metadata` is for Kedro-Viz."""
        self.root = Path(filepath)  # directory that holds the checkpoints of all runs
        # Value of the setting `resume`: `latest`, a checkpoint's path, or an MLflow run id
        self.requested = None if resume is None else str(resume)
        self.checkpoint: Path | None = None  # directory of the checkpoint to resume from, which `resolve` sets
        self.metadata = metadata
        self._is_resolved = False

    def resolve(self, checkpoint: Path | None) -> None:
        """Set the checkpoint that the run resumes from; None: the run starts at the beginning."""
        self.checkpoint, self._is_resolved = checkpoint, True

    def load(self) -> Path | None:
        """Return the checkpoint's directory.

        Raises:
            DatasetError: `resume` is not the path of a checkpoint, and no hook has looked it up in MLflow.
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


class EvaluationLogDataset(RunDataset[dict[str, Any], list[dict[str, Any]]]):
    """The evaluations of a run, one row per evaluation: the lines of the run's metrics.jsonl that are evaluations.

    Within a run they are the run's. Elsewhere, as in a notebook, `filepath` is the run's own directory, or the
    directory of all runs if only one run is there. The rows decide which checkpoint is the best. A row has the metrics
    of an evaluation, and the values that a later evaluation or the choice of the best checkpoint needs. Saving appends
    one line. A node saves an empty dict if no evaluation was due; saving an empty dict changes nothing. Example:

    ```yaml
    evaluation_metrics:
      type: ppo_rlhf.datasets.EvaluationLogDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: dict[str, Any]) -> None:
        """Append one evaluation. Of two evaluations of one iteration the newer counts."""
        if data:
            metrics_of(self.written).add_evaluation(data)

    def load(self) -> list[dict[str, Any]]:
        """Return the run's evaluations, oldest first."""
        return evaluations.read_evaluations(self._directory())

    def _exists(self) -> bool:
        try:
            return (self._directory() / METRICS).is_file()
        except DatasetError:  # several runs, of which none is this one, as before a run of a project begins
            return False

    def _directory(self) -> Path:
        if self.folder is not None:
            return self.folder
        folders = [path.parent for path in self.root.glob(f"**/{METRICS}")]
        found = [folder for folder in folders if metrics_of(folder).evaluations()]
        if len(found) > 1:
            names = ", ".join(sorted(path.name for path in found))
            raise DatasetError(f"{self.root} has several runs; give the directory of one: {names}")
        return found[0] if found else self.root


class CompletionsDataset(RunDataset[list[dict[str, Any]], NoReturn]):
    """The completions of the active run's sampled iterations, in the directory of the run's checkpoints.

    The catalog entry `completions` cannot be loaded. Example:

    ```yaml
    completions:
      type: ppo_rlhf.datasets.CompletionsDataset
      filepath: data/06_models/ppo_checkpoints
    ```
    """

    def save(self, data: list[dict[str, Any]]) -> None:
        """Write the file of one iteration; an empty list writes nothing, because no completions were due."""
        evaluations.write_completions(self.written, data)

    def load(self) -> NoReturn:
        raise DatasetError("completions are only written: read the files by datasets.load_dataset.")

    def _exists(self) -> bool:
        return (self.written / evaluations.COMPLETIONS).is_dir()


def run_directory(root: Path) -> Path:
    """Return the directory of the active MLflow run; without an active run, the directory of an untracked run.

    In a distributed run only the main process has an active MLflow run. A hook passes the run id to the other processes
    in the environment.
    """
    run = mlflow.active_run()
    run_id = run.info.run_id if run else None
    if not is_main_process():
        run_id = os.environ.get(RUN_ID)
    return root / (run_id or untracked.name)
