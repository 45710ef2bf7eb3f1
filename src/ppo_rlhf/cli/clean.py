"""`kedro clean`: deletes what old runs left in the project, run by run."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import mlflow
from mlflow.entities import Run, ViewType
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import context_here, existing_store
from ppo_rlhf.data.files import FORMATS
from ppo_rlhf.datasets.search_filters import equals
from ppo_rlhf.hooks.moved_artifacts import follow_artifacts
from ppo_rlhf.hooks.run_record import RunRecord
from ppo_rlhf.hooks.tracking_store import store_errors_as_config_errors
from ppo_rlhf.runtime.locks import is_let_go, one_at_a_time
from ppo_rlhf.runtime.names import env_option

COLLECTING = "collect_feedback"
"""The pipeline whose runs are kept with the policies that people compare: their verdict goes onto the policy's card."""
DAY = 86_400  # one day in seconds: many file systems update a file's access time at most once a day


@click.command(cls=Command)
@click.option(
    "--keep", metavar="N", type=click.IntRange(0), default=5, show_default=True, help="Newest finished runs to keep."
)
@click.option("--yes", is_flag=True, help="Delete. Without --yes the command lists what it would delete.")
@click.option("--env", "-e", help="The Kedro environment of the runs.")
def clean(keep: int, yes: bool, env: str | None) -> Iterator[str]:
    """Delete what old runs left in the project: folders, checkpoints, versions of models, and the runs in MLflow.

    Only runs with a folder in this project are deleted. Kept are the newest N finished runs, champions, the run with
    the best win rate, runs that are running or can be resumed, runs that collected pairs for people, and each run whose
    model or checkpoint a kept run reads. People's answers in MLflow are never deleted. Caches (tables of your files,
    unpacked GGUF files) that were not read for a day are deleted, too.
    """
    context, lines = context_here(env), list[str]()
    try:
        # While this process holds the project's lock, no run can start. The report's lines are printed after the
        # project's lock is released, because a pager may block the printing until the user quits.
        with one_at_a_time(context.project_path), store_errors_as_config_errors("kedro clean did not finish"):
            lines.extend(_clean(context, keep, yes))
    finally:
        yield from lines


@dataclass
class OwnRun:
    """A run with a folder in this project, and what it left.

    Attributes:
        run: The MLflow run.
        record: What the run reads and has written.
        below: Its child runs without a folder of their own, which are kept or deleted with it.
        folders: The folders that the run and its child runs left, and that exist; the run's own folder is the last.
    """

    run: Run
    record: RunRecord
    below: list[Run] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    @property
    def inside(self) -> list[Path]:
        """The folders that are in the project, and not behind a link that leads out of it."""
        return [folder for folder in self.folders if _is_inside(folder, self.record.project)]


def _clean(context: Any, keep: int, yes: bool) -> Iterator[str]:
    """Do the work of the command `clean`, and yield the lines of the report."""
    from ppo_rlhf.datasets.run_catalog import file_of, is_model

    project: Path = context.project_path
    uri = existing_store(context.mlflow, context.env)
    follow_artifacts(uri, context.mlflow.tracking.experiment.create_experiment_kwargs.artifact_location)
    mlflow.set_tracking_uri(uri)
    if registry := context.mlflow.server.mlflow_registry_uri:
        mlflow.set_registry_uri(registry)
    # Keep the catalog in a variable, because Kedro's property `context.catalog` builds a new catalog at each access
    catalog = context.catalog
    entries = [catalog.get(name) for name in list(catalog)]
    files = [file_of(entry) for entry in entries]
    homes = {file.parent / "runs" for file in files if file}
    homes |= {entry.root for entry in entries if hasattr(entry, "root")}
    models = [entry.load() for entry in entries if is_model(entry)]
    read_next = {Path(model.source) for model in models if model}
    all_runs = mlflow.search_runs(search_all_experiments=True, run_view_type=ViewType.ALL, output_format="list")
    own = _own_runs(all_runs, project, homes)  # the newest run first, as search_runs returned them
    why_kept = _needed(own, environment=context.env or "local", keep=keep, read_next=read_next)
    deletable, total = [each for run_id, each in own.items() if run_id not in why_kept and each.inside], 0
    for each in deletable:
        yield f"MLflow run {each.run.info.run_id} ({each.run.info.run_name}, {each.run.info.status})"
        for folder in each.inside:
            total += (size := _size(folder))
            yield f"{size / 1e6:10,.1f} MB  {folder.relative_to(project)}"
        if yes:
            _delete(each)
    tables = {Path(entry.cache) for entry in entries if getattr(entry, "cache", None)}
    unpacked = {entry.gguf_cache for entry in entries if is_model(entry) and entry.gguf_cache}
    caches = sorted(folder for folder in _old_caches(tables, unpacked) if _is_inside(folder, project))
    if caches:
        yield "Caches that were not read for a day (a run that needs a table or a GGUF file caches it again)"
    for folder in caches:
        total += (size := _size(folder))
        yield f"{size / 1e6:10,.1f} MB  {folder.relative_to(project)}"
        if yes:
            shutil.rmtree(folder)
    done = "deleted" if yes else f"kedro clean{env_option(context.env)} --yes deletes them"
    yield f"{len(deletable)} runs, {len(caches)} caches, {total / 1e6:,.1f} MB: {done}."
    known = {run.info.run_id for run in all_runs}
    kept = Counter(why_kept.values())
    kept["of other projects, or without a folder here"] = len(all_runs) - sum(
        1 + len(each.below) for each in own.values()
    )
    kept["folders of runs that MLflow does not know"] = sum(
        folder.is_dir() and folder.name not in known for home in homes for folder in home.glob("[!.]*")
    )
    kept["folders outside the project"] = sum(len(each.folders) - len(each.inside) for each in own.values())
    yield f"Kept: {', '.join(f'{count} {what}' for what, count in kept.items() if count) or 'nothing'}."


def _own_runs(all_runs: Iterable[Run], project: Path, homes: Iterable[Path]) -> dict[str, OwnRun]:
    """Return the runs of this project by run id, each with the folders that it left."""
    own, others = dict[str, OwnRun](), list[Run]()
    for run in all_runs:
        record = RunRecord.of_run(run, project)
        if record is None:
            others.append(run)
        else:
            own[run.info.run_id] = OwnRun(run, record)
    for run in others:
        if (parent := own.get(run.data.tags.get(MLFLOW_PARENT_RUN_ID, ""))) is not None:
            parent.below.append(run)
    experiments = sorted({each.run.info.experiment_id for each in own.values()})
    logged = mlflow.search_logged_models(experiments, output_format="list") if experiments else []
    for each in own.values():
        ids, own_folder = [run.info.run_id for run in (each.run, *each.below)], each.record.folder
        uris = [run.info.artifact_uri for run in (each.run, *each.below)]
        uris += [model.artifact_location for model in logged if model.source_run_id in ids]
        of_runs = sorted(home / run_id for home in homes for run_id in ids)
        left = [*each.record.writes, *map(_artifacts, uris), *(folder for folder in of_runs if folder != own_folder)]
        for folder in [*left, own_folder]:
            if folder.is_dir() and not any(folder.samefile(other) for other in each.folders):
                each.folders.append(folder)
    return own


def _is_inside(folder: Path, project: Path) -> bool:
    return folder.resolve().is_relative_to(project.resolve())


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _old_caches(tables: set[Path], unpacked: set[Path]) -> set[Path]:
    """Return the folders of cached tables and of unpacked GGUF files that were not read for a day.

    Cached tables from the hub are left out, because a run may need them offline.
    """
    cached = {folder for cache in tables for kind in FORMATS.values() for folder in cache.glob(f"{kind}/*")}
    cached |= {folder for cache in unpacked for folder in cache.glob("*")}
    begin = time.time() - DAY
    return {
        folder
        for folder in cached
        if all(max(file.stat().st_atime, file.stat().st_mtime) < begin for file in folder.rglob("*") if file.is_file())
    }


def _needed(own: Mapping[str, OwnRun], *, environment: str, keep: int, read_next: Iterable[Path]) -> dict[str, str]:
    """Return the reason why a run is kept, by run id."""
    why: dict[str, str] = {}
    best, newest = _best(), 0
    for run_id, each in own.items():
        run, tags, is_active = each.run, each.run.data.tags, each.run.info.lifecycle_stage == "active"
        if not is_let_go(each.record.folder):
            why[run_id] = "running"
        elif tags.get("environment") != environment:
            why[run_id] = "of other environments"
        elif is_active and run.info.status == "FINISHED" and newest < keep:
            newest += 1
            why[run_id] = "newest"
        elif is_active and COLLECTING in tags.get("pipeline", "").split(","):
            why[run_id] = "with pairs that people compare"
        elif run_id in best:
            why[run_id] = "champion or best"
        elif is_active and run.info.status != "FINISHED" and each.record.can_resume:
            why[run_id] = "to be resumed"
    owners = {folder.resolve(): run_id for run_id, each in own.items() for folder in each.folders}
    read = {*read_next, *(path for run_id in why for path in own[run_id].record.reads)}
    while read:
        places = {place for path in read for place in (path.resolve(), *path.resolve().parents)}
        more = {owners[place] for place in places & owners.keys()} - why.keys()
        why |= dict.fromkeys(more, "read by another run")
        read = {path for run_id in more for path in own[run_id].record.reads}
    return why


def _best() -> set[str | None]:
    """Return the ids of runs whose registered policy has an alias (such as champion) or the highest win rate."""
    versions = mlflow.search_model_versions()
    best = max(versions, key=lambda version: float(version.tags.get("win_rate", -1)), default=None)
    models = mlflow.search_registered_models()
    named = {(model.name, str(version)) for model in models for version in model.aliases.values()}
    return {each.run_id for each in versions if each is best or (each.name, str(each.version)) in named}


def _delete(own: OwnRun) -> None:
    """Delete a run's folders. If the run's MLflow artifacts are in the project, delete the run in MLflow as well.

    Deleting a run in MLflow also deletes its model versions, its logged models, and its child runs. The run's own
    folder is deleted last, so that `kedro clean` still knows a run of which it could not delete everything.
    """
    client = mlflow.MlflowClient()
    is_local = _artifacts(own.run.info.artifact_uri).is_relative_to(own.record.project)
    for run in (own.run, *own.below) if is_local else ():
        for version in client.search_model_versions(equals("run_id", run.info.run_id)):
            client.delete_model_version(version.name, str(version.version))
        if run.info.lifecycle_stage == "active":
            client.delete_run(run.info.run_id)
        query = equals("source_run_id", run.info.run_id)
        for model in mlflow.search_logged_models([run.info.experiment_id], query, output_format="list"):
            client.delete_logged_model(model.model_id)
    for folder in own.inside:
        shutil.rmtree(folder)


def _artifacts(uri: str) -> Path:
    return Path(local_file_uri_to_path(uri)).parent
