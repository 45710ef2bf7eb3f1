"""Which run `resume` means, and whether this run may go on with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run, RunStatus
from mlflow.exceptions import MlflowException

from ppo_rlhf.checkpoints.files import newest_whole_checkpoint
from ppo_rlhf.checkpoints.resume import CHANGES_NUMBERS
from ppo_rlhf.checkpoints.resume_tags import number_of_resumes, resume_tags
from ppo_rlhf.checkpoints.store import saved_config
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.datasets.resume_checkpoint import LATEST
from ppo_rlhf.hooks.metric_log import BIT_IDENTICAL
from ppo_rlhf.hooks.resume_comparison import Change, Comparison, compare_runs
from ppo_rlhf.hooks.run_description import RunDescription
from ppo_rlhf.hooks.run_end import relative_to
from ppo_rlhf.hooks.run_lock import RunLock
from ppo_rlhf.preflight.resume import find_named

logger = logging.getLogger(__name__)

RUNS_PER_PAGE = 100


@dataclass(frozen=True)
class ResumeRequest:
    """What a person asked for, and the run that asks.

    Attributes:
        requested: `latest`, a checkpoint's directory, or an MLflow run id.
        this: The run that asks.
        root: Holds the checkpoints of all runs.
        project_path: The project's directory.
        experiment_id: Where `latest` looks for runs.
        active_run: The id of an MLflow run that was open before, and is to be used.
    """

    requested: str
    this: RunDescription
    root: Path
    project_path: Path
    experiment_id: str
    active_run: str | None = None

    @property
    def source(self) -> str:
        """What the person typed, for messages."""
        return f"resume={self.requested}"


@dataclass(frozen=True)
class Resumption:
    """A run that goes on; its lock is held.

    Attributes:
        run: The MLflow run, as it was left.
        checkpoint: What it goes on from; None: from its beginning.
        lock: Of the run's directory.
        directory: Where its checkpoints are.
        comparison: What changed that may change.
    """

    run: Run
    checkpoint: Path | None
    lock: RunLock
    directory: Path
    comparison: Comparison = field(default_factory=Comparison)

    @property
    def number(self) -> int:
        """How often the run went on, this time included."""
        return 1 + number_of_resumes(self.run.data.tags)

    def tags(self, project_path: Path) -> dict[str, str]:
        """Return what MLflow is told of this resumption."""
        where = "none" if self.checkpoint is None else relative_to(self.checkpoint, project_path)
        changes = {name: now for name, (_, now) in self._changes.items()}
        is_other = bool(self.comparison.versions or CHANGES_NUMBERS & self.comparison.changes.keys())
        return {
            **resume_tags(self.number, where, changes),
            **({BIT_IDENTICAL: "false"} if is_other else {}),
        }

    @property
    def _changes(self) -> dict[str, Change]:
        return {**self.comparison.changes, **self.comparison.returned, **self.comparison.versions}

    def say(self, project_path: Path) -> None:
        """Log what happens."""
        run_id = self.run.info.run_id
        if self.checkpoint is None:
            logger.info("Going on with MLflow run %s from its beginning: it has no checkpoint yet.", run_id)
        else:
            logger.info("Going on with MLflow run %s from %s.", run_id, relative_to(self.checkpoint, project_path))
        for name, (before, now) in self._changes.items():
            logger.info("Changed since it was interrupted: %s was %s, is %s.", name, before, now)


def find_resumption(request: ResumeRequest, client: MlflowClient) -> Resumption | None:
    """Return the run to go on with, locked; None (which is said) for a new run. Nothing is written.

    Raises:
        ConfigError: What was asked for is not there, still runs, or has other settings or data: one line each.
        CheckpointError: The checkpoint asked for is damaged.
    """
    return _latest(request, client) if request.requested == LATEST else _named(request, client)


def lock_given_run(run_id: str, root: Path) -> RunLock:
    """Return the lock of an MLflow run that a new training is told to use, in which none has left a checkpoint.

    Raises:
        ConfigError: It still runs, or has checkpoints: the new ones would lie among them.
    """
    lock = _take_lock(run_id, root)
    if newest_whole_checkpoint(root / run_id) is not None:
        lock.give_back()
        raise ConfigError(
            f"MLflow run {run_id} has checkpoints. Go on from them by resume={run_id}, or start a new run: leave out "
            "what names this one (tracking.run.id in mlflow.yml, MLFLOW_RUN_ID, or an open run)."
        )
    return lock


def _take_lock(run_id: str, root: Path, asked_by: str = "") -> RunLock:
    lock = RunLock.take(root / run_id)
    if lock is None:
        raise ConfigError(f"{asked_by}MLflow run {run_id} still runs; stop it first, or wait for its end.")
    return lock


def _latest(request: ResumeRequest, client: MlflowClient) -> Resumption | None:
    for run in _unfinished(request, client):
        lock = RunLock.take(request.root / run.info.run_id)
        if lock is None:
            logger.info("MLflow run %s is left out: it still runs.", run.info.run_id)
            continue
        try:
            run = client.get_run(run.info.run_id)  # another process may have ended it meanwhile
            if run.info.status == RunStatus.to_string(RunStatus.FINISHED):
                lock.give_back()
                continue
            resumption = _accepted_latest(request, run, lock)
        except BaseException:
            lock.give_back()
            raise
        if resumption is None:
            lock.give_back()
        return resumption
    tags = request.this.tags
    logger.info(
        "%s: pipeline %s has no unfinished run in environment %s to go on with; a new one starts from the beginning.",
        *(request.source, tags["pipeline"], tags["environment"]),
    )
    return None


def _accepted_latest(request: ResumeRequest, run: Run, lock: RunLock) -> Resumption | None:
    checkpoint = newest_whole_checkpoint(request.root / run.info.run_id)
    comparison = _compared(request, run, checkpoint)
    if checkpoint is None and comparison.refused:
        logger.info(
            "%s: MLflow run %s has no checkpoint, and was started otherwise (%s); a new run starts from the beginning.",
            *(request.source, run.info.run_id, comparison.refused[0]),
        )
        return None
    _refuse(comparison, run)
    return Resumption(run, checkpoint, lock, request.root / run.info.run_id, comparison)


def _named(request: ResumeRequest, client: MlflowClient) -> Resumption:
    named = find_named(request.requested, request.root, request.project_path)
    run = _run_of(named.run_id, request, client)
    directory = request.root / named.run_id
    lock = _take_lock(named.run_id, request.root, f"{request.source}: ")
    try:
        run = client.get_run(named.run_id)
        checkpoint = named.checkpoint or newest_whole_checkpoint(directory)
        comparison = _compared(request, run, checkpoint)
        if named.checkpoint is not None and "total_episodes" in comparison.changes:
            _refuse_longer_rewind(request, named.checkpoint, directory)
        _refuse(comparison, run)
        return Resumption(run, checkpoint, lock, request.root / run.info.run_id, comparison)
    except BaseException:
        lock.give_back()
        raise


def _run_of(run_id: str, request: ResumeRequest, client: MlflowClient) -> Run:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ConfigError(
            f"{request.source}: the tracking store of mlflow.yml has no run {run_id}; use the store that it was "
            "logged to."
        ) from None
    if run.info.lifecycle_stage == LifecycleStage.DELETED:
        raise ConfigError(f"{request.source}: MLflow run {run_id} was deleted; restore it: mlflow runs restore.")
    if run.info.experiment_id != request.experiment_id:
        raise ConfigError(
            f"{request.source}: MLflow run {run_id} is in another experiment than mlflow.yml names; name its own in "
            "tracking.experiment.name."
        )
    if request.active_run not in (None, run_id):
        raise ConfigError(
            f"{request.source}: MLflow run {request.active_run} is open already; end it before another one goes on."
        )
    return run


def _unfinished(request: ResumeRequest, client: MlflowClient) -> Iterator[Run]:
    """Yield the runs of this pipeline and environment that may go on, the one that started last first."""
    tags, token = request.this.tags, None
    while True:
        page = client.search_runs(
            [request.experiment_id],
            filter_string="attributes.status != 'FINISHED'",
            order_by=["attributes.start_time DESC"],
            max_results=RUNS_PER_PAGE,
            page_token=token,
        )
        for run in page:
            is_alike = all(run.data.tags.get(name) == tags[name] for name in ("pipeline", "environment"))
            is_meant = request.active_run in (None, run.info.run_id)
            if is_alike and is_meant and (request.root / run.info.run_id).is_dir():
                yield run
        token = page.token
        if not token:
            return


def _compared(request: ResumeRequest, run: Run, checkpoint: Path | None) -> Comparison:
    return compare_runs(request.this, run, None if checkpoint is None else saved_config(checkpoint))


def _refuse(comparison: Comparison, run: Run) -> None:
    if comparison.refused:
        advice = f"MLflow run {run.info.run_id} goes on only as it was started; leave out resume to start a new run."
        raise ConfigError("\n".join([*comparison.refused, advice]))


def _refuse_longer_rewind(request: ResumeRequest, checkpoint: Path, directory: Path) -> None:
    newest = newest_whole_checkpoint(directory) or checkpoint
    if newest.name != checkpoint.name:
        raise ConfigError(
            f"{request.source}: with another ppo.total_episodes a run goes on only from its newest checkpoint, "
            f"{relative_to(newest, request.project_path)}."
        )
