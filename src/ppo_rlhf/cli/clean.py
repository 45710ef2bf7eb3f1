"""`kedro clean`: what old runs have left in the project, deleted run by run."""

from __future__ import annotations

import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import mlflow
from mlflow.entities import Run, ViewType
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import context_here, existing_store
from ppo_rlhf.data.sources import FORMATS
from ppo_rlhf.hooks.run_log import WRITTEN
from ppo_rlhf.hooks.tracking_store import store_errors_as_config_errors
from ppo_rlhf.locks import LOCK_FILE, lock_run, one_at_a_time

OUTSIDE = "outside the project"
DAY = 86_400  # seconds; many disks note at most once a day that a file was read
Folders = Mapping[str, list[Path]]


@click.command(cls=Command)
@click.option("--keep", metavar="N", type=click.IntRange(0), default=5, show_default=True, help="Newest finished runs.")
@click.option("--yes", is_flag=True, help="Delete. Without it the command lists what it would delete.")
@click.option("--env", "-e", help="Kedro's environment, whose runs are meant.")
def clean(keep: int, yes: bool, env: str | None) -> Iterator[str]:
    """Delete what old runs left in the project: folders, checkpoints, versions of models, and the runs in MLflow.

    The newest N finished runs stay, and so do champions, the best, runs that can be resumed or are running, and each
    run whose model or checkpoint one of them reads. Cached tables of your files that were not read for a day go, too.
    """
    from ppo_rlhf.datasets.run_catalog import file_of, is_model  # heavy: other commands do not wait for it

    context = context_here(env)
    project: Path = context.project_path
    # one_at_a_time: no run starts meanwhile
    with one_at_a_time(project), store_errors_as_config_errors("kedro clean did not finish"):
        mlflow.set_tracking_uri(existing_store(context.mlflow))
        catalog = context.catalog  # which is made anew at each access
        entries = [catalog.get(name) for name in list(catalog)]
        homes = {file.parent / "runs" for entry in entries if (file := file_of(entry))}
        homes |= {entry.root for entry in entries if hasattr(entry, "root")}
        read_next = {model.source for entry in entries if is_model(entry) and (model := entry.load())}
        found = mlflow.search_runs(search_all_experiments=True, run_view_type=ViewType.ALL, output_format="list")
        runs: dict[str, Run] = {run.info.run_id: run for run in found}  # the newest first
        folders = _folders(runs, homes, project)
        why = _needed(runs, folders, context.env or "local", keep, read_next)
        going, total = [run_id for run_id in runs if run_id not in why and folders[run_id]], 0
        for run_id in going:
            yield f"MLflow run {run_id} ({runs[run_id].info.run_name}, {runs[run_id].info.status})"
            for folder in folders[run_id]:
                total += (size := _size(folder))
                yield f"{size / 1e6:10,.1f} MB  {folder.relative_to(project)}"
            if yes:
                _delete(runs, run_id, folders[run_id], project)
        tables = _old_tables({Path(entry.cache) for entry in entries if getattr(entry, "cache", None)}, project)
        if tables:
            yield "Cached tables that were not read for a day (a run that needs one makes it again)"
        for folder in tables:
            total += (size := _size(folder))
            yield f"{size / 1e6:10,.1f} MB  {folder.relative_to(project)}"
            if yes:
                shutil.rmtree(folder)
    done = "deleted" if yes else "kedro clean --yes deletes them"
    yield f"{len(going)} runs, {len(tables)} cached tables, {total / 1e6:,.1f} MB: {done}."
    left = Counter(why.values()) + Counter(
        {f"folders of {name}": len(folders[name]) for name in sorted(folders.keys() - runs.keys())}
    )
    yield f"Left: {', '.join(f'{count} {what}' for what, count in left.items()) or 'nothing'}."


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _old_tables(caches: set[Path], project: Path) -> list[Path]:
    """Return the folders of cached tables not read for a day; tables of the hub stay, which may be needed offline."""
    found = {folder for cache in caches for kind in FORMATS.values() for folder in cache.glob(f"{kind}/*")}
    inside = sorted(folder for folder in found if folder.resolve().is_relative_to(project.resolve()))
    begin = time.time() - DAY
    return [
        folder
        for folder in inside
        if all(max(file.stat().st_atime, file.stat().st_mtime) < begin for file in folder.rglob("*") if file.is_file())
    ]


def _folders(runs: Mapping[str, Run], homes: set[Path], project: Path) -> Folders:
    """Return the folders by run id, also of runs that MLflow does not know, and those outside the project."""
    experiments = sorted({run.info.experiment_id for run in runs.values()}) or ["0"]
    places = [(folder.name, folder) for home in sorted(homes) for folder in sorted(home.glob("[!.]*"))]
    for run_id, run in runs.items():
        places += [(run_id, Path(path)) for path in _tagged(run, WRITTEN)]
        places.append((run_id, _artifacts(run.info.artifact_uri)))
    for model in mlflow.search_logged_models(experiments, output_format="list"):
        places.append((str(model.source_run_id), _artifacts(model.artifact_location)))
    folders = defaultdict[str, list[Path]](list)
    for run_id, folder in places:
        if folder.is_dir():
            folders[run_id if folder.resolve().is_relative_to(project.resolve()) else OUTSIDE].append(folder)
    return folders


def _needed(
    runs: Mapping[str, Run], folders: Folders, environment: str, keep: int, read_next: set[str]
) -> dict[str, str]:
    """Return the runs that stay, and why."""
    why: dict[str, str] = {}
    best = _best()
    for run_id, run in runs.items():
        if MLFLOW_PARENT_RUN_ID in run.data.tags:
            continue  # it stays or goes with its parent
        status = run.info.status if run.info.lifecycle_stage == "active" else "deleted in MLflow"
        own = next((folder for folder in folders[run_id] if (folder / LOCK_FILE).exists()), None)
        lock = own and lock_run(own)
        if run.data.tags.get("environment") != environment:
            why[run_id] = "of other environments"
        elif status == "RUNNING" or (own and not lock):
            why[run_id] = "running"
        elif status == "FINISHED" and [*why.values()].count("newest") < keep:
            why[run_id] = "newest"
        elif run_id in best:
            why[run_id] = "champion or best"
        elif own and status in ("FAILED", "KILLED", "SCHEDULED"):
            why[run_id] = "to be resumed"
        if lock:
            lock.close()
    more = dict(why)
    while more:
        read = read_next.union(*(_tagged(runs[run_id], "data.") for run_id in why))
        read |= {part for path in read for part in Path(path).parts}
        more = {
            run_id: "read by another"
            for run_id, run in runs.items()
            if run_id not in why
            and (run.data.tags.get(MLFLOW_PARENT_RUN_ID) in why or read & {run_id, *_tagged(run, WRITTEN)})
        }
        why |= more
    return why


def _best() -> set[str | None]:
    """Return the runs of the registered policies that have an alias, as champions have, and of the highest win rate."""
    versions = mlflow.search_model_versions()
    best = max(versions, key=lambda version: float(version.tags.get("win_rate", -1)), default=None)
    models = mlflow.search_registered_models()
    named = {(model.name, str(version)) for model in models for version in model.aliases.values()}
    return {each.run_id for each in versions if each is best or (each.name, str(each.version)) in named}


def _delete(runs: Mapping[str, Run], run_id: str, folders: list[Path], project: Path) -> None:
    """Delete a run's folders, and in MLflow it and all that is its own, if MLflow's artifacts are in the project."""
    client, run = mlflow.MlflowClient(), runs[run_id]
    family = [each for each in runs.values() if run_id in (each.info.run_id, each.data.tags.get(MLFLOW_PARENT_RUN_ID))]
    for each in family if _artifacts(run.info.artifact_uri).is_relative_to(project) else ():
        query = f"run_id = '{each.info.run_id}'"
        for version in client.search_model_versions(query):
            client.delete_model_version(version.name, str(version.version))
        if each.info.lifecycle_stage == "active":
            client.delete_run(each.info.run_id)
        for model in mlflow.search_logged_models([run.info.experiment_id], f"source_{query}", output_format="list"):
            client.delete_logged_model(model.model_id)
    for folder in folders:
        shutil.rmtree(folder)


def _tagged(run: Run, beginning: str) -> list[str]:
    return [text for name, text in run.data.tags.items() if name.startswith(beginning)]


def _artifacts(uri: str) -> Path:
    return Path(local_file_uri_to_path(uri)).parent
