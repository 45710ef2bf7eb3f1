"""`kedro clean`: deletes what old runs left in the project, run by run."""

from __future__ import annotations

import platform
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import mlflow
from mlflow.entities import Run, ViewType
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import context_here, existing_store
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.files import FORMATS
from ppo_rlhf.datasets.search_filters import equals
from ppo_rlhf.hooks.run_description import CHECKPOINTS, NONE, PROJECT_PATH, place_of
from ppo_rlhf.hooks.run_log import WRITTEN
from ppo_rlhf.hooks.tracking_store import store_errors_as_config_errors
from ppo_rlhf.runtime.locks import LOCK_FILE, lock_run, one_at_a_time
from ppo_rlhf.runtime.names import env_option

OUTSIDE = "outside the project"
ELSEWHERE = "of other projects or hosts"
UNFINISHED = ("FAILED", "KILLED", "SCHEDULED", "RUNNING")
MOST_PLACES = 10
COLLECTING = "collect_feedback"
"""The pipeline whose runs are kept with the policies that people compare: their verdict goes onto the policy's card."""
DAY = 86_400  # one day in seconds: many file systems update a file's access time at most once a day
Folders = Mapping[str, list[Path]]


@click.command(cls=Command)
@click.option(
    "--keep", metavar="N", type=click.IntRange(0), default=5, show_default=True, help="Newest finished runs to keep."
)
@click.option("--yes", is_flag=True, help="Delete. Without --yes the command lists what it would delete.")
@click.option("--env", "-e", help="The Kedro environment of the runs.")
@click.option(
    "--moved-from",
    metavar="HOST:PATH",
    multiple=True,
    help="A former place of this project, whose runs count as its own. *:PATH is that folder on any host.",
)
def clean(keep: int, yes: bool, env: str | None, moved_from: tuple[str, ...]) -> Iterator[str]:
    """Delete what old runs left in the project: folders, checkpoints, versions of models, and the runs in MLflow.

    Only runs of this project on this host are deleted. Kept are the newest N finished runs, champions, the run with
    the best win rate, runs that are running or can be resumed, runs that collected pairs for people, and each run whose
    model or checkpoint a kept run reads. People's answers in MLflow are never deleted. Caches (tables of your files,
    unpacked GGUF files) that were not read for a day are deleted, too.
    """
    context, lines = context_here(env), list[str]()
    try:
        # While this process holds the project's lock, no run can start. The report's lines are printed after the
        # project's lock is released, because a pager may block the printing until the user quits.
        with one_at_a_time(context.project_path), store_errors_as_config_errors("kedro clean did not finish"):
            lines.extend(_clean(context, keep, yes, moved_from))
    finally:
        yield from lines


def _clean(context: Any, keep: int, yes: bool, moved_from: Sequence[str]) -> Iterator[str]:
    """Do the work of the command `clean`, and yield the lines of the report."""
    from ppo_rlhf.datasets.run_catalog import file_of, is_model

    project: Path = context.project_path
    mlflow.set_tracking_uri(existing_store(context.mlflow, context.env))
    # Keep the catalog in a variable, because Kedro's property `context.catalog` builds a new catalog at each access
    catalog = context.catalog
    entries = [catalog.get(name) for name in list(catalog)]
    files = [file_of(entry) for entry in entries]
    homes = {file.parent / "runs" for file in files if file}
    homes |= {entry.root for entry in entries if hasattr(entry, "root")}
    models = [entry.load() for entry in entries if is_model(entry)]
    read_next = {model.source for model in models if model}
    all_runs = mlflow.search_runs(search_all_experiments=True, run_view_type=ViewType.ALL, output_format="list")
    # search_runs returned the newest MLflow run first
    runs = Runs({run.info.run_id: run for run in all_runs}, project, moved_from)
    folders = _folders(runs, homes)
    why_kept = _needed(runs, folders, homes, environment=context.env or "local", keep=keep, read_next=read_next)
    inside = {run_id: [*filter(runs.is_inside, paths)] for run_id, paths in folders.items()}
    deletable, total = [run_id for run_id in runs.all if run_id not in why_kept and inside[run_id]], 0
    for run_id in deletable:
        yield f"MLflow run {run_id} ({runs.all[run_id].info.run_name}, {runs.all[run_id].info.status})"
        for folder in inside[run_id]:
            total += (size := _size(folder))
            yield f"{size / 1e6:10,.1f} MB  {folder.relative_to(project)}"
        if yes:
            _delete(runs, run_id, inside[run_id], why_kept)
    tables = {Path(entry.cache) for entry in entries if getattr(entry, "cache", None)}
    unpacked = {entry.gguf_cache for entry in entries if is_model(entry) and entry.gguf_cache}
    caches = sorted(filter(runs.is_inside, _old_caches(tables, unpacked)))
    if caches:
        yield "Caches that were not read for a day (a run that needs a table or a GGUF file caches it again)"
    for folder in caches:
        total += (size := _size(folder))
        yield f"{size / 1e6:10,.1f} MB  {folder.relative_to(project)}"
        if yes:
            shutil.rmtree(folder)
    done = "deleted" if yes else f"kedro clean{env_option(context.env)} --yes deletes them"
    yield f"{len(deletable)} runs, {len(caches)} caches, {total / 1e6:,.1f} MB: {done}."
    yield from _what_is_kept(runs, folders, why_kept)


class Runs:
    """All runs of the tracking store.

    The own runs of a project are the runs started in its folder on this host, and the child runs of those runs.
    """

    def __init__(self, runs: dict[str, Run], project: Path, moved_from: Sequence[str]) -> None:
        """Find the place `host:path` of each run. `moved_from` lists former places of the project.

        Raises:
            ConfigError: No run comes from a former place of the project, or the former place still has a project.
        """
        self.all, self.project = runs, project
        self.places = {run_id: self._place(run) for run_id, run in runs.items()}
        known = {*filter(None, self.places.values())}
        known |= {f"*:{place.partition(':')[2]}" for place in known}
        for given in moved_from:
            host, _, folder = given.partition(":")
            there = Path(folder)
            if given not in known:
                raise ConfigError(f"--moved-from {given}: no run is of this place. `kedro clean` lists all places.")
            if host in ("*", platform.node()) and (there / "pyproject.toml").exists() and not there.samefile(project):
                raise ConfigError(f"--moved-from {given}: a project is still there. Run `kedro clean` there.")
        self._own_places = {f"{platform.node()}:{project.as_posix()}", *moved_from}

    def is_own(self, run_id: str) -> bool:
        """Return whether a run belongs to this project, by its own tags or by the tags of its parent run."""
        place = self.places[run_id]
        return place is not None and not self._own_places.isdisjoint({place, f"*:{place.partition(':')[2]}"})

    def here(self, run: Run, path: str) -> Path:
        """Return a path from the tags of a run, changed to the project's present folder if the project was moved."""
        former, noted = run.data.tags.get(PROJECT_PATH, str(self.project)), Path(path)
        return self.project / noted.relative_to(former) if noted.is_relative_to(former) else noted

    def is_inside(self, folder: Path) -> bool:
        """Return whether a folder is in the project and not behind a link that leads out of the project."""
        return folder.resolve().is_relative_to(self.project.resolve())

    def _place(self, run: Run) -> str | None:
        while (parent := run.data.tags.get(MLFLOW_PARENT_RUN_ID)) in self.all:
            run = self.all[parent]
        return place_of(run.data.tags)


def _what_is_kept(runs: Runs, folders: Folders, why_kept: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that count the kept runs by reason, and that say how to include runs of a moved project."""
    outside = sum(not runs.is_inside(folder) for run_id in folders for folder in folders[run_id])
    kept = Counter(why_kept.values()) + Counter(
        {f"folders of {name}": len(folders[name]) for name in sorted(folders.keys() - runs.all.keys())}
    )
    kept += Counter({f"folders {OUTSIDE}": outside})
    yield f"Kept: {', '.join(f'{count} {what}' for what, count in kept.items()) or 'nothing'}."
    elsewhere = [runs.places[run_id] for run_id, reason in why_kept.items() if reason == ELSEWHERE]
    places = Counter(place for place in elsewhere if place)
    for place, count in places.most_common(MOST_PLACES):
        yield f"{count:6} runs of {place}"
    if len(places) > MOST_PLACES:
        yield f"       and runs of {len(places) - MOST_PLACES} other places"
    if places:
        yield (
            "If one of these is a former place of this project (a former path or host name), --moved-from HOST:PATH "
            "includes its runs; * as HOST means any host."
        )


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


def _folders(runs: Runs, homes: set[Path]) -> Folders:
    """Return the folders of each run by run id. A folder may be outside the project, and MLflow may not know a run."""
    experiments = sorted({run.info.experiment_id for run in runs.all.values()}) or ["0"]
    candidates = [(folder.name, folder) for home in sorted(homes) for folder in sorted(home.glob("[!.]*"))]
    for run_id, run in runs.all.items():
        noted = [*_tagged(run, WRITTEN), str(_artifacts(run.info.artifact_uri))]
        if (root := run.data.tags.get(CHECKPOINTS, NONE)) != NONE:
            noted.append(f"{root}/{run_id}")
        candidates += [(run_id, runs.here(run, path)) for path in noted if runs.is_own(run_id)]
    for model in mlflow.search_logged_models(experiments, output_format="list"):
        run_id = str(model.source_run_id)
        if run_id in runs.all and runs.is_own(run_id):
            candidates.append((run_id, runs.here(runs.all[run_id], str(_artifacts(model.artifact_location)))))
    folders = defaultdict[str, list[Path]](list)
    for run_id, folder in candidates:
        if folder.is_dir() and not any(folder.samefile(other) for other in folders[run_id]):
            folders[run_id].append(folder)
    return folders


def _needed(
    runs: Runs, folders: Folders, homes: set[Path], *, environment: str, keep: int, read_next: set[str]
) -> dict[str, str]:
    """Return the reason why a run is kept, by run id.

    A run counts as one of the newest only if it has a folder on this machine, because another container may have the
    same host name and path.
    """
    why: dict[str, str] = {}
    best = _best()
    for run_id, run in runs.all.items():
        if not runs.is_own(run_id):
            why[run_id] = ELSEWHERE
            continue
        own = next((folder for folder in folders[run_id] if (folder / LOCK_FILE).exists()), None)
        if own is None and run.data.tags.get(MLFLOW_PARENT_RUN_ID) in runs.all:
            continue  # `kedro clean` keeps or deletes a child run together with its parent run
        status = run.info.status if run.info.lifecycle_stage == "active" else "deleted in MLflow"
        lock = None if own is None else lock_run(own)
        is_here = any(runs.is_inside(folder) or folder.parent in homes for folder in folders[run_id])
        if run.data.tags.get("environment") != environment:
            why[run_id] = "of other environments"
        elif (own and not lock) or (not own and status == "RUNNING"):
            why[run_id] = "running"
        elif status == "FINISHED" and is_here and [*why.values()].count("newest") < keep:
            why[run_id] = "newest"
        elif COLLECTING in run.data.tags.get("pipeline", "").split(",") and run.info.lifecycle_stage == "active":
            why[run_id] = "with pairs that people compare"
        elif run_id in best:
            why[run_id] = "champion or best"
        elif status in UNFINISHED and own:
            why[run_id] = "to be resumed"
        elif status in UNFINISHED and not _has_no_checkpoints(runs, run):
            why[run_id] = "unfinished, whose checkpoints may be elsewhere"
        if lock:
            lock.close()
    more = dict(why)
    while more:
        read = read_next.union(*(_tagged(runs.all[run_id], "data.") for run_id in why))
        read |= {part for path in read for part in Path(path).parts}
        more = {
            run_id: "read by another run"
            for run_id, run in runs.all.items()
            if run_id not in why
            and (run.data.tags.get(MLFLOW_PARENT_RUN_ID) in why or read & {run_id, *_written(runs, run)})
        }
        why |= more
    return why


def _has_no_checkpoints(runs: Runs, run: Run) -> bool:
    """Return whether an unfinished run certainly has no checkpoints.

    A run has no checkpoints if its pipeline writes none, or if its folder is gone while other runs' folders exist. If
    the folder of all runs' checkpoints is missing or empty, the function returns False, because the folder's disk may
    be unmounted.
    """
    noted = run.data.tags[CHECKPOINTS]
    if noted == NONE:
        return True
    root = runs.here(run, noted)
    return runs.is_inside(root) and root.is_dir() and any(root.iterdir())


def _written(runs: Runs, run: Run) -> set[str]:
    """Return the paths of a run's models: the recorded paths, and the paths in the project's present folder."""
    noted = _tagged(run, WRITTEN)
    return {*noted, *(str(runs.here(run, path)) for path in noted)}


def _best() -> set[str | None]:
    """Return the ids of runs whose registered policy has an alias (such as champion) or the highest win rate."""
    versions = mlflow.search_model_versions()
    best = max(versions, key=lambda version: float(version.tags.get("win_rate", -1)), default=None)
    models = mlflow.search_registered_models()
    named = {(model.name, str(version)) for model in models for version in model.aliases.values()}
    return {each.run_id for each in versions if each is best or (each.name, str(each.version)) in named}


def _delete(runs: Runs, run_id: str, folders: list[Path], kept: Collection[str]) -> None:
    """Delete a run's folders. If the run's MLflow artifacts are in the project, delete the run in MLflow as well.

    Deleting a run in MLflow also deletes its model versions, its logged models, and its child runs that are not in
    `kept`.
    """
    client, run = mlflow.MlflowClient(), runs.all[run_id]
    family = [
        each
        for each in runs.all.values()
        if run_id in (each.info.run_id, each.data.tags.get(MLFLOW_PARENT_RUN_ID)) and each.info.run_id not in kept
    ]
    is_local = runs.here(run, str(_artifacts(run.info.artifact_uri))).is_relative_to(runs.project)
    for each in family if is_local else ():
        for version in client.search_model_versions(equals("run_id", each.info.run_id)):
            client.delete_model_version(version.name, str(version.version))
        if each.info.lifecycle_stage == "active":
            client.delete_run(each.info.run_id)
        query = equals("source_run_id", each.info.run_id)
        for model in mlflow.search_logged_models([run.info.experiment_id], query, output_format="list"):
            client.delete_logged_model(model.model_id)
    for folder in folders:
        shutil.rmtree(folder)


def _tagged(run: Run, beginning: str) -> list[str]:
    return [text for name, text in run.data.tags.items() if name.startswith(beginning)]


def _artifacts(uri: str) -> Path:
    return Path(local_file_uri_to_path(uri)).parent
