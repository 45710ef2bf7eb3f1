"""The run and the checkpoint that `resume=` names, and whether this run may go on with them.

`resume` is `latest`, an MLflow run id, or the directory of a run or of a checkpoint.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.resume_changes import Change, differences, resume_tags
from ppo_rlhf.hooks.run_description import RunDescription
from ppo_rlhf.hooks.run_end import relative_to
from ppo_rlhf.hooks.run_lock import RunLock
from ppo_rlhf.runner import plan_loop

if TYPE_CHECKING:  # heavy: only a run pays for it
    from ppo_rlhf.datasets import ResumeCheckpointDataset

logger = logging.getLogger(__name__)

RESUME_CHECKPOINT = "resume_checkpoint"
LATEST = "latest"


@dataclass(frozen=True)
class Resumption:
    """A run that goes on.

    Attributes:
        run: The MLflow run, as it was left.
        checkpoint: The checkpoint that it goes on from; None: from its beginning.
        lock: The held lock of the run's directory.
        changes: The settings that changed and may, by their name in a tag.
    """

    run: Run
    checkpoint: Path | None
    lock: RunLock
    changes: dict[str, Change] = field(default_factory=dict)

    def tags(self, project_path: Path) -> dict[str, str]:
        """Return the tags of this resume."""
        where = "none" if self.checkpoint is None else relative_to(self.checkpoint, project_path)
        return resume_tags(self.run, where, self.changes)

    def say(self, project_path: Path) -> None:
        """Log what the run goes on from, and each change."""
        where = "its beginning: it has no checkpoint yet"
        if self.checkpoint is not None:
            where = relative_to(self.checkpoint, project_path)
        logger.info("Going on with MLflow run %s from %s.", self.run.info.run_id, where)
        for name, (before, now) in self.changes.items():
            logger.info("Changed since it was interrupted: %s was %s, is %s.", name, before, now)


def resume_entry(pipeline: Pipeline, catalog: CatalogProtocol) -> ResumeCheckpointDataset | None:
    """Return the catalog's entry for `resume` if this run holds the closed loop, else None.

    A run that holds a part of the loop has no state to go on with: `resume=latest` starts it from the beginning.
    """
    is_loop = bool(plan_loop(pipeline))
    if not is_loop and RESUME_CHECKPOINT not in pipeline.inputs():
        return None
    from ppo_rlhf.datasets import ResumeCheckpointDataset

    entry = catalog.get(RESUME_CHECKPOINT)
    if not isinstance(entry, ResumeCheckpointDataset):
        return None
    if is_loop:
        return entry
    if entry.requested == LATEST:
        logger.info("resume=%s: this run holds a part of the loop alone, so it starts from the beginning.", LATEST)
        entry.resolve(None)
    return None


def check_named(entry: ResumeCheckpointDataset, project_path: Path) -> Path | None:
    """Return the checkpoint that `resume` names, None if it names another thing; nothing but the disk is asked.

    Raises:
        ConfigError: The run or checkpoint that is named does not exist.
        CheckpointError: It is damaged, or lies in the directory of a run that did not write it.
    """
    from ppo_rlhf.checkpoints.files import verify_checkpoint_of_run

    if entry.requested in (None, LATEST):
        return None
    _, checkpoint = find_named(str(entry.requested), entry.root, project_path)
    if checkpoint is not None:
        verify_checkpoint_of_run(checkpoint)
    return checkpoint


def find_named(requested: str, root: Path, project_path: Path) -> tuple[str, Path | None]:
    """Return the run id, and the checkpoint if one is named, for a run id or a directory. Nothing is written.

    Args:
        requested: What the person gave; a path is taken from the project, or else from the working directory.
        root: Holds the checkpoints of all runs.
        project_path: The project's directory.

    Raises:
        ConfigError: There is no such thing, or it lies elsewhere.
    """
    from ppo_rlhf.checkpoints.files import checkpoint_iterations

    if re.fullmatch(r"[\w-]+", requested) and (root / requested).is_dir():
        return requested, None
    given = Path(requested).expanduser()
    path = next((place.resolve() for place in (project_path / given, given.absolute()) if place.is_dir()), None)
    home = root.resolve()
    if path is not None and path.parent == home:
        return path.name, None
    if path is not None and path.parent.parent == home:
        return path.parent.name, root / path.parent.name / path.name
    if path is not None:
        raise ConfigError(
            f"resume={requested}: is not a checkpoint below {root}. Name its folder there, "
            f"{root / '<MLflow run id>' / 'iteration_NNNNNN'}. A checkpoint of PPOTrainer goes on in PPOTrainer: "
            "train(resume_from_checkpoint=…)."
        )
    runs = sorted(filter(checkpoint_iterations, root.glob("*")), key=lambda run: run.stat().st_mtime, reverse=True)
    hint = "No run has a checkpoint there: leave out resume to start one."
    if runs:
        hint = f"The newest there: {', '.join(run.name for run in runs[:3])}. Or give resume={LATEST}."
    raise ConfigError(f"resume={requested}: there is no such checkpoint, and no run of that id below {root}. {hint}")


def find_resumption(
    requested: str, this: RunDescription, root: Path, project_path: Path, experiment_id: str
) -> Resumption | None:
    """Return the run to go on with, locked; None (which is logged) for a new run. Nothing is written.

    Args:
        requested: `latest`, an MLflow run id, or the directory of a run or a checkpoint.
        this: The run that starts.
        root: Holds the checkpoints of all runs.
        project_path: The project's directory.
        experiment_id: The MLflow experiment in which `latest` looks for runs.

    Raises:
        ConfigError: The run is not there, is being trained, or has other settings or data.
    """
    if requested != LATEST:
        return _named(requested, this, root, project_path)
    names = ("pipeline", "environment")
    unfinished = mlflow.search_runs(
        [experiment_id],
        filter_string=" and ".join([*(f"tags.{name} = '{this.tags[name]}'" for name in names), "status != 'FINISHED'"]),
        order_by=["attributes.start_time DESC"],
        output_format="list",
    )
    for run in unfinished:
        run_id = run.info.run_id
        if not (root / run_id).is_dir():
            continue  # of another machine
        lock = RunLock.take(root / run_id)
        if lock is None:
            logger.info("MLflow run %s is left out: it still runs.", run_id)
        elif mlflow.get_run(run_id).info.status == "FINISHED":  # another process has gone on with it meanwhile
            lock.release()
        else:
            return _unchanged(requested, this, run, lock, _newest(root / run_id))
    logger.info(
        "resume=%s: pipeline %s has no unfinished run in environment %s to go on with; a new one starts from the "
        "beginning.",
        *(LATEST, *(this.tags[name] for name in names)),
    )
    return None


def _named(requested: str, this: RunDescription, root: Path, project_path: Path) -> Resumption | None:
    run_id, checkpoint = find_named(requested, root, project_path)
    try:
        run = mlflow.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(
            f"resume={requested}: the tracking store of mlflow.yml has no run {run_id}; use the store that it was "
            "logged to."
        ) from None
    lock = RunLock.take(root / run_id)
    if lock is None:
        raise ConfigError(f"resume={requested}: MLflow run {run_id} still runs; stop it first, or wait for its end.")
    newest = _newest(root / run_id)
    resumption = _unchanged(requested, this, run, lock, checkpoint or newest)
    is_longer = resumption is not None and "total_episodes" in resumption.changes
    if is_longer and checkpoint is not None and newest is not None and checkpoint.name != newest.name:
        lock.release()
        raise ConfigError(
            f"resume={requested}: with another ppo.total_episodes a run goes on only from its newest checkpoint, "
            f"{relative_to(newest, project_path)}."
        )
    return resumption


def _unchanged(
    requested: str, this: RunDescription, run: Run, lock: RunLock, checkpoint: Path | None
) -> Resumption | None:
    """Return the resumption of a locked run if this run's settings and data are the same.

    None if `latest` found a run that has no checkpoint and was started otherwise: then a new run loses nothing.
    """
    refused, changes = differences(this, run)
    if not refused:
        return Resumption(run, checkpoint, lock, changes)
    lock.release()
    run_id = run.info.run_id
    if requested != LATEST or checkpoint is not None:
        raise ConfigError(
            f"resume={requested}: MLflow run {run_id} goes on only as it was started, but these differ: "
            f"{'; '.join(refused)}. Take them back, or leave out resume to start a new run."
        )
    logger.info(
        "resume=%s: MLflow run %s has no checkpoint, and was started otherwise: %s. A new run starts.",
        *(LATEST, run_id, "; ".join(refused)),
    )
    return None


def _newest(directory: Path) -> Path | None:
    from ppo_rlhf.checkpoints.files import newest_whole_checkpoint

    return newest_whole_checkpoint(directory)
