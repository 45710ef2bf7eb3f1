"""Finds the run and the checkpoint that `resume=` names, and decides whether the new run may resume from the
checkpoint.

`resume` is `latest`, an MLflow run id, or the directory of a run or of a checkpoint. MLflow's params cannot change, so
a resumed run records each changed setting as a tag `resume.<setting>` (PPO's settings without `ppo.`). If a run was
resumed several times, the value of the last resume counts.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import mlflow
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from mlflow.entities import LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.run_description import (
    PROCESSES,
    PROJECT_PATH,
    VERSIONS,
    RunDescription,
    as_text,
    functions_in,
)
from ppo_rlhf.hooks.run_record import RUN_FILE, RunRecord
from ppo_rlhf.runner import plan_loop
from ppo_rlhf.runtime.locks import lock_run
from ppo_rlhf.runtime.names import CHECKPOINT, LATEST, RESUME_CHECKPOINT, TRAININGS
from ppo_rlhf.runtime.paths import readable_path

if TYPE_CHECKING:
    from ppo_rlhf.datasets import ResumeCheckpointDataset

logger = logging.getLogger(__name__)

JUDGED = ("reward.components", "evaluation.judge", "evaluation.judges")
"""MLflow params whose value may be a language model that judges. A resumed run may use another language model as judge,
so that a judge that failed can be fixed."""
TAG, DATA = "resume.", "data."
FOUND_MEANWHILE = ("data.audited_holes.fingerprint", "data.human_evaluation.fingerprint")
"""Results of other pipelines that only evaluations and the report read, never the training. They may be made while a
run is interrupted, and are not compared."""
BATCH = ("ppo.per_device_train_batch_size", "ppo.gradient_accumulation_steps", PROCESSES)
"""Params and tag whose product, the rollout batch, stays the same on resume."""
BIT_IDENTICAL = "bit_identical"
LABELLER, LABELLED, EVALUATION = "reward_modelling.labeller", "preferences", "params:evaluation"
_COMPARED_TAG = re.compile(r"pipeline|environment|launch\..+|data\..+\.fingerprint")
_VERSION = "version."
_OF_THE_MACHINE = (_VERSION, "launch.")
"""Prefixes of the names of software versions and of the launch. A resumed run may have other versions or another
launch, but its results are then not bit-identical."""

Named = tuple[str, Path | None]
"""The id of a run, and the checkpoint if `resume` names a checkpoint rather than a run."""
Change = tuple[Any, Any]
"""The type of a changed setting: its values in the interrupted run and in the resumed run, as JSON has them."""


@dataclass(frozen=True)
class Resumption:
    """An earlier run that the new run resumes."""

    run: Run  # the MLflow run to resume, in the state in which the run stopped
    before: RunDescription  # the run's own settings and data
    checkpoint: Path | None  # the checkpoint from which training resumes; None: training starts from the beginning
    lock: IO[bytes]  # the lock file in the run's directory, open and locked
    # The allowed changes of settings, keyed by their names in tags
    changes: dict[str, Change] = field(default_factory=dict)

    def say(self, project_path: Path, this: RunDescription, *, is_sweep: bool = False) -> None:
        """Log the checkpoint to resume from, each changed setting, and each `auto` setting for which this machine would
        choose another value than the resumed run has.
        """
        where = "the trainings that have not ended" if is_sweep else "its beginning: it has no checkpoint yet"
        if self.checkpoint is not None:
            where = readable_path(self.checkpoint, project_path)
        logger.info("Resuming MLflow run %s from %s.", self.run.info.run_id, where)
        for name, (before, now) in self.changes.items():
            logger.info("Changed since it was interrupted: %s was %.40s, is %.40s.", name, before, now)
        for name in sorted(this.chosen_here):
            kept, here = self.before.params.get(name, this.params[name]), this.params[name]
            if kept != here:
                logger.info("%s=auto: the run keeps %s, its value so far; here auto would be %s.", name, kept, here)

    def tags(self, project_path: Path) -> dict[str, str]:
        """Return the tags that record the resume: the checkpoint and the changed values of settings."""
        from ppo_rlhf.checkpoints.restore import CHANGES_NUMBERS

        where = "none" if self.checkpoint is None else readable_path(self.checkpoint, project_path)
        tags = {f"{TAG}{CHECKPOINT}": where, **self._changed}
        # Resuming a run does not restore vLLM's sampling noise
        uses_vllm = self.before.params.get("ppo.rollout_engine") == "vllm"
        if uses_vllm or any(
            name in CHANGES_NUMBERS or name in JUDGED or name.startswith((*_OF_THE_MACHINE, DATA))
            for name in self.changes
        ):
            tags[BIT_IDENTICAL] = "false"
        return tags

    @property
    def _changed(self) -> dict[str, str]:
        return {f"{TAG}{name}": as_text(now)[:MAX_PARAM_VAL_LENGTH] for name, (_, now) in self.changes.items()}

    def make_anew(self, this: RunDescription, pipeline: Pipeline) -> tuple[str, ...]:
        """Make the nodes outside the loop that depend on a changed function run again.

        The function forgets the stored outputs of the nodes that run again, and returns the stages of their metrics.
        """
        from ppo_rlhf.datasets.run_catalog import StageOutputs

        functions = {name for name in self.changes if name.startswith(DATA) or name in JUDGED}
        stages = [node for node in pipeline.nodes if functions and EVALUATION in node.inputs]
        labeller = f"{DATA}{(this.params.get(LABELLER) or '').partition(':')[0]}.fingerprint"
        if labeller in functions and "data.raw_preferences.path" not in this.tags:
            stages += [node for node in pipeline.nodes if LABELLED in node.outputs]
        outdated = pipeline.from_nodes(*(node.name for node in stages)).all_outputs() if stages else set()
        if outdated:
            logger.info("The stages that depend on the changed functions run again.")
            StageOutputs(Path(self.lock.name).parent, frozenset()).forget(outdated)
        return tuple(name.removesuffix("_metrics") for name in outdated if name.endswith("_metrics"))


def can_resume(pipeline: Pipeline) -> bool:
    """Return whether a run of `pipeline` can be resumed: the pipeline has PPO's whole loop or a sweep."""
    return plan_loop(pipeline) is not None or TRAININGS in pipeline.all_outputs()


def resume_entry(pipeline: Pipeline, catalog: CatalogProtocol) -> ResumeCheckpointDataset | None:
    """Return the catalog entry of the resume checkpoint if a run of `pipeline` can be resumed, else None."""
    if not can_resume(pipeline):
        return None
    from ppo_rlhf.datasets import ResumeCheckpointDataset

    entry = catalog.get(RESUME_CHECKPOINT)
    return entry if isinstance(entry, ResumeCheckpointDataset) else None


def find_named(requested: str | None, root: Path, project_path: Path) -> Named | None:
    """Return the run, and the checkpoint if any, that `requested` names; None if `requested` is None or `latest`.

    `requested` is a run id, or the directory of a run or of a checkpoint. A relative path is looked up below `root`,
    then below the project, then below the working directory. `root` holds the checkpoints of all runs.

    Raises:
        ConfigError: `requested` names no existing run or checkpoint.
        CheckpointError: The checkpoint is damaged, or is in the directory of a run that did not write it.
    """
    from ppo_rlhf.checkpoints.files import Checkpoint, checkpoint_iterations

    if requested is None or requested == LATEST:
        return None
    home, given = root.resolve(), Path(requested).expanduser()
    candidates = (home / given, project_path / given, given.absolute())
    path = next((_without_links(folder, home) for folder in candidates if folder.is_dir()), home)
    if path.parent == home:
        return path.name, None
    if path.parent.parent == home:
        Checkpoint(path, of_its_run=True)
        return path.parent.name, root / path.relative_to(home)
    runs = sorted(filter(checkpoint_iterations, root.glob("*")), key=lambda run: run.stat().st_mtime, reverse=True)
    newest = f" (the newest: {', '.join(run.name for run in runs[:3])})" if runs else ""
    raise ConfigError(
        f"resume={requested}: there is no run and no checkpoint of that name below {root}. Give {LATEST}, an MLflow "
        f"run id{newest}, or a folder {Path('<MLflow run id>', 'iteration_NNNNNN')} there."
    )


def _without_links(folder: Path, home: Path) -> Path:
    """Return a folder's path without links, except those below `home`: a run or a checkpoint may be a link."""
    plain = Path(os.path.normpath(folder))
    return plain if plain.is_relative_to(home) else plain.parent.resolve() / plain.name


def find_resumption(
    requested: str, named: Named | None, this: RunDescription, root: Path, experiment_id: str
) -> Resumption | None:
    """Return the run to resume, with its directory locked; log a new run and return None. Only the lock is written.

    `named` is None for `resume=latest`. `resume=latest` resumes the experiment's newest unfinished run that no process
    is training and that has the pipeline, environment, machine, settings and data of `this`. An earlier run with
    different settings or data is skipped, and a log line names the skipped run.

    Raises:
        ConfigError: The run does not exist, is being trained, has different settings or data, or has a newer checkpoint
            than the named one.
    """
    from ppo_rlhf.checkpoints.files import check_newest, checkpoint_iterations, newest_whole_checkpoint

    for run in _unfinished(this, root, experiment_id) if named is None else [_named_run(requested, named[0])]:
        run_id, directory = run.info.run_id, root / run.info.run_id
        if not directory.is_dir():
            continue  # the run was started on another machine, or was killed before it had anything to go on from
        lock = lock_run(directory)
        if lock is None:
            if named is not None:
                raise ConfigError(f"resume={requested}: MLflow run {run_id} still runs; stop it first, or wait for it.")
            logger.info("MLflow run %s still runs; it is skipped.", run_id)
            continue
        with ExitStack() as refusal:
            refusal.enter_context(lock)
            if named is None and mlflow.get_run(run_id).info.status == "FINISHED":
                continue  # another process has resumed and finished the run since the search for runs
            record = RunRecord.of_folder(directory, Path(this.tags.get(PROJECT_PATH, "")))
            if record is None:
                line = f"resume={requested}: {directory / RUN_FILE} is missing, so the run's settings are not known"
                if named is not None:
                    raise ConfigError(f"{line}. Start a new run.")
                logger.info("%s; the run is skipped.", line)
                continue
            before = RunDescription(record.params, record.tags)
            refused, changes = differences(this, before)
            if refused and named is None:
                line = f"resume={requested}: MLflow run {run_id} is skipped, as settings differ: {'; '.join(refused)}."
                again = f" With the old settings resume={run_id} continues that run."
                logger.info("%s", line + (again if checkpoint_iterations(directory) else ""))
                continue
            if refused:
                raise ConfigError(
                    f"resume={requested}: MLflow run {run_id} resumes only with its original settings. Changed since: "
                    f"{'; '.join(refused)}. Restore the settings, or leave out resume to start a new run."
                )
            checkpoint = named[1] if named else None
            if checkpoint is None:
                checkpoint = newest_whole_checkpoint(directory)
            else:
                check_newest(checkpoint)
            refusal.pop_all()
            return Resumption(run, before, checkpoint, lock, changes)
    logger.info(
        "resume=%s: pipeline %s has no unfinished run in environment %s; a new run starts.",
        LATEST,
        this.tags["pipeline"],
        this.tags["environment"],
    )
    return None


def _named_run(requested: str | None, run_id: str) -> Run:
    """Return the MLflow run with the id `run_id`.

    Raises:
        ConfigError: The tracking store does not know the run, or the run was deleted.
    """
    try:
        run = mlflow.get_run(run_id)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise
        line = "the tracking store does not know this MLflow run (`mlflow gc` deletes runs for good). Start a new run."
        raise ConfigError(f"resume={requested}: {line}") from error
    if run.info.lifecycle_stage == LifecycleStage.DELETED:
        line = "this run was deleted in MLflow; restore it there, which is possible until `mlflow gc` runs."
        raise ConfigError(f"resume={requested}: {line}")
    return run


def _unfinished(this: RunDescription, root: Path, experiment_id: str) -> list[Run]:
    """Return the unfinished runs with the pipeline and environment of `this`, the run whose folder was written last
    first.

    The runs are not sorted by start times, because a clock may have been set back.
    """
    found: list[Run] = mlflow.search_runs([experiment_id], "attributes.status != 'FINISHED'", output_format="list")
    # Compared here, because a filter of MLflow's cannot have every name of a folder
    same = ("pipeline", "environment")
    runs = [run for run in found if all(run.data.tags.get(name) == this.tags[name] for name in same)]

    def written_at(run: Run) -> float:
        folder = root / run.info.run_id
        return folder.stat().st_mtime if folder.is_dir() else run.info.start_time / 1000

    return sorted(runs, key=written_at, reverse=True)


def differences(this: RunDescription, earlier: RunDescription) -> tuple[list[str], dict[str, Change]]:
    """Compare the new run (`this`) with the earlier run that the new run would resume.

    Return the refused differences in words, and the allowed changes of settings, keyed by the name that a tag gives
    each setting. The comparison leaves out params that the earlier run did not have, `auto` settings that this machine
    chose, and paths that changed only because the project was moved. Files with a user's functions may change, so that
    a function that failed can be fixed.
    """
    from ppo_rlhf.checkpoints.restore import MAY_CHANGE

    groups = {name.split(".")[0] for name in this.params}
    before = {name: value for name, value in earlier.params.items() if name.split(".")[0] in groups}
    before |= _compared(earlier.tags)
    now = {**this.params, **_compared(this.tags)}
    now |= {name: before[name] for name in this.chosen_here & before.keys()}
    # Look in the earlier and in the new settings, because the resumed run may lack a callback of the earlier run
    values = (*before.values(), *this.params.values())
    functions = {f"{DATA}{module}.fingerprint" for value in values for module in functions_in(value)}
    here = this.tags.get(PROJECT_PATH, "")
    former = earlier.tags.get(PROJECT_PATH, here)
    refused, changes = [], {}
    reason, compared = _compared_over_the_run(before, now)
    for name in sorted(before.keys() | {name for name in now if name.startswith(DATA)}):
        was, is_now = before.get(name, "none"), now.get(name, "none")
        group, _, setting = name.partition(".")
        if was == is_now or name in FOUND_MEANWHILE:
            continue
        if isinstance(was, str) and was.startswith(f"{former}/") and here + was.removeprefix(former) == is_now:
            continue
        may_change = group == "reporting" or (group == "ppo" and setting in MAY_CHANGE) or name in functions
        may_change |= name in JUDGED and _without_models(was) == _without_models(is_now)
        if name in compared:
            refused.append(f"{name.removesuffix('.fingerprint')}, as {reason} compares the scores of all evaluations")
        elif may_change or name.startswith(_OF_THE_MACHINE):
            changes[setting if group == "ppo" else name] = (was, is_now)
        elif group == "data":
            path = this.tags.get(name.replace(".fingerprint", ".path"), "not read by this run")
            refused.append(f"the data {setting.removesuffix('.fingerprint')} ({path})")
        else:
            refused.append(f"{name} ({was} before, {is_now} now)")
    was_batch, is_batch = _batch(before), _batch(now)
    if None not in (was_batch, is_batch) and was_batch != is_batch:
        names = " x ".join(name.rpartition(".")[2] for name in BATCH)
        refused.append(f"the rollout batch, {names} ({was_batch} before, {is_batch} now)")
    return refused, changes


def _compared_over_the_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Return the setting by which a run compares judge and reward of all its evaluations, and what it compares."""
    setting = "evaluation.on_exploitation"
    if now.get(setting, "off") == "off":
        return "", set()
    names = {"reward.components", "evaluation.judge"}
    values = [settings.get(name) for settings in (before, now) for name in names]
    files = {f"{DATA}{module}.fingerprint" for value in values for module in functions_in(value)}
    return f"{setting}={now[setting]}", names | files


def _batch(settings: Mapping[str, Any]) -> int | None:
    """Return the responses of an iteration; None if the settings do not say it, as before a run has logged its own."""
    return math.prod(int(settings[name]) for name in BATCH) if all(name in settings for name in BATCH) else None


def _without_models(value: Any) -> Any:
    """Return a param's value, in which one word replaces the settings of each language model that judges."""
    if isinstance(value, list):
        return [_without_models(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if {"model", "base_url"} <= value.keys():
        return "a language model"
    return {name: _without_models(each) for name, each in value.items()}


def as_last_resumed(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that earlier resumes changed, keyed by their name as a param or a tag."""
    changed = {name.removeprefix(TAG): value for name, value in tags.items() if name.startswith(TAG)}
    changed.pop(CHECKPOINT, None)
    return {(name if "." in name else f"ppo.{name}"): value for name, value in changed.items()}


def _compared(tags: Mapping[str, str]) -> dict[str, str]:
    versions = dict(each.split(" ", 1) for each in filter(None, tags.get(VERSIONS, "").split(", ")))
    of_packages = {f"{_VERSION}{package}": version for package, version in versions.items()}
    return {name: value for name, value in tags.items() if _COMPARED_TAG.fullmatch(name)} | of_packages
