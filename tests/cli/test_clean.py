"""`kedro clean`: deletes what old runs left, run by run, and nothing that is still needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import mlflow
import pytest
from click.testing import Result
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus

from ppo_rlhf.hooks.run_record import RunRecord
from tests.conftest import REPOSITORY

Kedro = Callable[..., Result]

RUNS = "data/06_models/ppo_checkpoints"
ELSEWHERE = "of other projects, or without a folder here"
VERSIONS = ("2026-01-01T00.00.01.000Z", "2026-01-01T00.00.02.000Z", "2026-01-01T00.00.03.000Z")


class Recorded:
    """A project with runs in MLflow and on disk, as `kedro run` leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.models = folder, folder / "data" / "06_models"
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        self.client = MlflowClient()
        self._experiment = self.client.create_experiment("ppo_rlhf", str(folder / "mlartifacts"))
        self._count = 0

    def version(self, model: str, version: str) -> str:
        """Make the folder of a model."""
        folder = self.models / model / version
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1_000_000))
        return str(folder)

    def run(
        self,
        status: str = "FINISHED",
        *,
        environment: str = "local",
        trained: bool = True,
        root: str = RUNS,
        reads: str = "",
        writes: str = "",
        **tags: str,
    ) -> str:
        """Record the youngest run, with a report and an artifact; if trained, also with a checkpoint.

        Args:
            status: MLflow's.
            environment: Kedro's.
            trained: Whether it has checkpoints, from which it can be resumed.
            root: The folder of all runs' folders, as the run's tag names it; empty: the run has no folder.
            reads: The path of a model.
            writes: The path of another model.
            tags: Other tags by their name.
        """
        self._count += 1
        below = "mlflow.parentRunId" in tags and not trained  # trainings of a sweep have neither of these
        if not below:
            tags = {"environment": environment, "checkpoints": root, "project_path": str(self.folder), **tags}
        tags = {name: text for name, text in tags.items() if text}
        run = self.client.create_run(self._experiment, start_time=self._count, tags=tags, run_name=f"n{self._count}")
        self.client.log_text(run.info.run_id, "a report", "report/report.html")
        if status != "RUNNING":
            self.client.set_terminated(run.info.run_id, status)
        data = self.folder / "data"
        places = [data / "08_reporting" / "runs" / run.info.run_id / "report.html"]
        folder = self.folder / root / run.info.run_id
        if trained:
            places.append(folder / "iteration_000001" / "state.json")
        if root and not below:
            places.append(folder / "run.lock")
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("")
        if root and not below:
            record = RunRecord(self.folder, folder, can_resume=trained)
            record.note(reads=[reads] if reads else [], writes=[Path(writes)] if writes else [])
        return str(run.info.run_id)

    def logged_model(self, run_id: str) -> str:
        """A model in MLflow, with an artifact."""
        model = self.client.create_logged_model(self._experiment, "ppo_policy", source_run_id=run_id)
        (self.folder / "weights").write_text("")
        self.client.log_model_artifact(model.model_id, str(self.folder / "weights"))
        self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        return str(model.model_id)

    def register(self, run_id: str, win_rate: float, alias: str | None = None) -> None:
        """A version of the registered model `aligned`."""
        if not self.client.search_registered_models():
            self.client.create_registered_model("aligned")
        source, tags = f"models:/{self.logged_model(run_id)}", {"win_rate": str(win_rate)}
        made = self.client.create_model_version("aligned", source, run_id, tags=tags)
        if alias is not None:
            self.client.set_registered_model_alias("aligned", alias, made.version)

    def left(self) -> set[str]:
        """Ids of the runs that MLflow shows. Checks that their files are complete and that no other run left a file."""
        shown = {run.info.run_id for run in self.client.search_runs([self._experiment])}
        for home in ("mlartifacts", "data/08_reporting/runs", "data/06_models/ppo_checkpoints"):
            found = {path.name for path in (self.folder / home).glob("*")} - {"models"}
            assert found <= shown, home
        assert {path.name for path in (self.folder / "data/08_reporting/runs").iterdir()} == shown
        return shown


@pytest.fixture
def recorded(project: Path) -> Recorded:
    return Recorded(project)


def cleaned(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    result = kedro(project, "clean", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_without_yes_everything_is_listed_with_its_size_and_nothing_is_deleted(kedro: Kedro, recorded: Recorded):
    version = recorded.version("sft_policy", VERSIONS[0])
    recorded.version("sft_policy", VERSIONS[1])
    old, new = recorded.run(writes=version), recorded.run()
    before = sorted(recorded.folder.rglob("*"))
    lines = cleaned(kedro, recorded.folder, "--keep", "1")
    assert recorded.left() == {old, new}
    assert sorted(recorded.folder.rglob("*")) == before
    assert lines[0] == f"MLflow run {old} (n1, FINISHED)"
    assert f"       1.0 MB  data/06_models/sft_policy/{VERSIONS[0]}" in lines
    assert f"       0.0 MB  data/06_models/ppo_checkpoints/{old}" in lines
    assert f"       0.0 MB  mlartifacts/{old}" in lines
    assert lines[-2:] == ["1 runs, 0 caches, 1.0 MB: kedro clean --yes deletes them.", "Kept: 1 newest."]
    assert "kedro clean --env demo --yes deletes them." in cleaned(kedro, recorded.folder, "--env", "demo")[-2]


def test_the_newest_finished_runs_stay_and_of_older_ones_all_goes(kedro: Kedro, recorded: Recorded):
    versions = [recorded.version("sft_policy", version) for version in VERSIONS]
    old, newer, newest = (recorded.run(writes=version) for version in versions)
    recorded.register(old, 0.5)
    recorded.register(newer, 0.6)
    lines = cleaned(kedro, recorded.folder, "--keep", "2", "--yes")
    assert recorded.left() == {newer, newest}
    assert [Path(version).exists() for version in versions] == [False, True, True]
    assert len(list((recorded.folder / "mlartifacts" / "models").iterdir())) == 1
    [version] = recorded.client.search_model_versions("name = 'aligned'")
    assert version.run_id == newer
    assert lines[-2:] == ["1 runs, 0 caches, 1.0 MB: deleted.", "Kept: 2 newest."]
    assert cleaned(kedro, recorded.folder, "--keep", "2")[0].startswith("0 runs, 0 caches, 0.0 MB")


def test_champion_best_and_unfinished_runs_stay(kedro: Kedro, recorded: Recorded):
    best, champion, other = recorded.run(), recorded.run(), recorded.run()
    for run_id, rate, alias in ((best, 0.9, None), (champion, 0.7, "champion"), (other, 0.6, None)):
        recorded.register(run_id, rate, alias)
    failed, early = recorded.run("FAILED"), recorded.run("FAILED", trained=False)
    dead, killed = recorded.run("RUNNING", trained=False), recorded.run("RUNNING")  # nobody holds their locks
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == {best, champion, failed, killed}
    assert not any((recorded.folder / "data/08_reporting/runs" / run_id).exists() for run_id in (early, dead))
    assert lines[-1] == "Kept: 2 to be resumed, 2 champion or best."


def test_a_champion_in_a_registry_of_its_own_stays(kedro: Kedro, recorded: Recorded):
    registry = f"sqlite:///{recorded.folder / 'registry.db'}"
    (recorded.folder / "conf" / "local" / "mlflow.yml").write_text(f"server: {{mlflow_registry_uri: '{registry}'}}")
    champion, _ = recorded.run(), recorded.run()
    client = MlflowClient(registry_uri=registry)
    client.create_registered_model("aligned")
    version = client.create_model_version("aligned", f"runs:/{champion}/ppo_policy", champion).version
    client.set_registered_model_alias("aligned", "champion", version)
    cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == {champion}


def test_runs_that_collected_pairs_for_people_stay_with_what_they_read(kedro: Kedro, recorded: Recorded):
    version = recorded.version("sft_policy", VERSIONS[0])
    recorded.version("sft_policy", VERSIONS[1])
    trained = recorded.run(writes=version)
    collected = recorded.run(trained=False, reads=version, pipeline="collect_feedback")
    both = recorded.run(trained=False, pipeline="collect_feedback,reporting")
    recorded.run(pipeline="align")
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == {trained, collected, both}
    assert "2 with pairs that people compare" in lines[-1]


@pytest.mark.slow
def test_a_run_that_was_deleted_in_mlflow_goes_whatever_it_was(kedro: Kedro, recorded: Recorded):
    failed = recorded.run("FAILED")
    recorded.client.delete_run(failed)
    cleaned(kedro, recorded.folder, "--yes")
    assert recorded.left() == set()


@pytest.mark.slow
def test_what_a_command_reads_next_and_runs_of_other_environments_stay_with_what_they_read(
    kedro: Kedro, recorded: Recorded
):
    first, second = (recorded.version("sft_policy", version) for version in VERSIONS[:2])
    wrote_first, wrote_newest, old = recorded.run(writes=first), recorded.run(writes=second), recorded.run()
    elsewhere = recorded.run(environment="gsm8k", reads=first)
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == {wrote_first, wrote_newest, elsewhere}
    assert old not in recorded.left()
    assert lines[-1] == "Kept: 1 of other environments, 2 read by another run."


@pytest.mark.slow
def test_a_chain_of_runs_stays_from_the_one_that_is_kept(kedro: Kedro, recorded: Recorded):
    first = recorded.version("sft_policy", VERSIONS[0])
    recorded.version("sft_policy", VERSIONS[1])  # no recorded run has written this version
    wrote, other = recorded.run(writes=first), recorded.run()
    trained = recorded.run(reads=first)
    checkpoint = recorded.models / "ppo_checkpoints" / trained / "iteration_000001" / "policy"
    newest = recorded.run(reads=str(checkpoint))
    child = recorded.run(**{"mlflow.parentRunId": newest}, trained=False)
    cleaned(kedro, recorded.folder, "--keep", "1", "--yes")
    assert recorded.left() == {wrote, trained, newest, child}
    assert other not in recorded.left()
    assert (recorded.models / "sft_policy" / VERSIONS[1]).is_dir()


def test_a_run_that_another_process_goes_on_with_is_not_touched(kedro: Kedro, recorded: Recorded):
    alive = recorded.run()
    code = (
        "import sys; from pathlib import Path; from ppo_rlhf.runtime.locks import lock_run; "
        "lock = lock_run(Path(sys.argv[1]))"
    )
    folder = recorded.models / "ppo_checkpoints" / alive
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
        process.communicate()
    assert recorded.left() == {alive}
    assert lines[-1] == "Kept: 1 running."


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run(["unshare", "--pid", "--fork", "true"]).returncode != 0, reason="no PID namespaces")
@pytest.mark.parametrize("status", ["RUNNING", "FINISHED"])
def test_a_run_of_another_container_is_alive_while_it_holds_its_lock_though_both_have_process_id_1(
    kedro: Kedro, recorded: Recorded, status: str
):
    """Two containers that share the project's folder and the host name, each with its program as process 1."""
    alive, dead = recorded.run(status), recorded.run(status, trained=False)
    folder = recorded.models / "ppo_checkpoints" / alive
    container = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
    holds = (
        "import os, sys; from pathlib import Path; from ppo_rlhf.runtime.locks import lock_run; "
        "lock = lock_run(Path(sys.argv[1])); print(os.getpid(), flush=True); sys.stdin.read()"
    )
    cleans = (
        "import os; assert os.getpid() == 1; from pathlib import Path; from kedro.framework.cli.cli import KedroCLI; "
        "KedroCLI(Path.cwd())(['clean', '--keep', '0', '--yes'])"
    )
    with subprocess.Popen(
        [*container, holds, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        done = subprocess.run([*container, cleans], cwd=recorded.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        process.kill()
    assert done.stdout.splitlines()[-1] == "Kept: 1 running."
    assert recorded.left() == {alive}
    assert dead not in recorded.left()
    cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == ({alive} if status == "RUNNING" else set())


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["finished", "gone"])
def test_a_run_below_another_one_is_asked_for_its_own_checkpoints(kedro: Kedro, recorded: Recorded, parent: str):
    above = recorded.run() if parent == "finished" else "a" * 32
    killed, finished = (recorded.run(status, **{"mlflow.parentRunId": above}) for status in ("KILLED", "FINISHED"))
    without = recorded.run("KILLED", trained=False, **{"mlflow.parentRunId": killed})
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == {killed, without}
    assert finished not in recorded.left()
    assert lines[-1].startswith("Kept: 1 to be resumed.")


@pytest.mark.slow
@pytest.mark.parametrize("is_linked", [False, True])
def test_an_unfinished_run_with_checkpoints_outside_of_the_project_stays(
    kedro: Kedro, recorded: Recorded, is_linked: bool
):
    outside = recorded.folder.parent / "disk"
    outside.mkdir()
    if is_linked:
        recorded.models.symlink_to(outside)
    else:
        (recorded.folder / "conf/local/globals.yml").write_text(f"data_root: {outside}\n")
    failed = recorded.run("FAILED", root=RUNS if is_linked else str(outside / "06_models" / "ppo_checkpoints"))
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.left() == {failed}
    assert lines[-1] == "Kept: 1 to be resumed, 1 folders outside the project."


@pytest.mark.slow
@pytest.mark.parametrize("mount_point", ["data/06_models", "data/06_models/ppo_checkpoints"])
def test_an_unfinished_run_outlives_a_clean_while_a_disk_inside_the_project_is_away(
    kedro: Kedro, recorded: Recorded, mount_point: str
):
    """A disk that is not mounted leaves an empty mount point."""
    killed = recorded.run("KILLED")
    mounted, away = recorded.folder / mount_point, recorded.folder.parent / "disk"
    mounted.rename(away)
    mounted.mkdir()
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert lines[-1] == f"Kept: 1 {ELSEWHERE}."
    mounted.rmdir()
    away.rename(mounted)
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert lines[-1] == "Kept: 1 to be resumed."
    assert recorded.left() == {killed}
    assert (recorded.models / "ppo_checkpoints" / killed / "iteration_000001" / "state.json").is_file()


@pytest.mark.slow
def test_runs_without_a_folder_here_are_neither_touched_nor_counted(kedro: Kedro, recorded: Recorded):
    """As those of another project, or of another container with the same host name and path, on a shared store."""
    old, own, other, another_program = recorded.run(), recorded.run(), recorded.run("FAILED"), recorded.run(root="")
    child = recorded.run(**{"mlflow.parentRunId": other}, trained=False)
    (recorded.models / "ppo_checkpoints" / other).rename(recorded.folder.parent / other)
    lines = cleaned(kedro, recorded.folder, "--keep", "1", "--yes")
    assert recorded.left() == {own, other, another_program, child}
    assert old not in recorded.left()
    assert lines[-1] == f"Kept: 1 newest, 3 {ELSEWHERE}."


def test_a_damaged_record_of_a_run_is_named_and_nothing_is_deleted(kedro: Kedro, recorded: Recorded):
    runs = recorded.run(), recorded.run()
    file = recorded.models / "ppo_checkpoints" / runs[0] / "run.json"
    file.write_text(file.read_text()[:20])
    result = kedro(recorded.folder, "clean", "--keep", "0", "--yes")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {file}: cannot be read (JSONDecodeError)")
    assert recorded.left() == {*runs}


@pytest.mark.slow
def test_a_run_with_its_folders_on_another_disk_counts_for_keep(kedro: Kedro, recorded: Recorded):
    outside = recorded.folder.parent / "disk"
    (recorded.folder / "conf/local/globals.yml").write_text(f"data_root: {outside}\n")
    old, new = recorded.run(), recorded.run(root=str(outside / "06_models/ppo_checkpoints"))
    (outside / "08_reporting/runs").mkdir(parents=True)
    (recorded.folder / "data/08_reporting/runs" / new).rename(outside / "08_reporting/runs" / new)
    shutil.rmtree(recorded.folder / "mlartifacts" / new)
    lines = cleaned(kedro, recorded.folder, "--keep", "1", "--yes")
    assert {run.info.run_id for run in recorded.client.search_runs(["1"])} == {new}
    assert not (recorded.folder / "mlartifacts" / old).exists()
    assert lines[-1] == "Kept: 1 newest, 2 folders outside the project."


@pytest.mark.slow
def test_the_lines_are_printed_when_the_project_is_free_again(kedro: Kedro, recorded: Recorded, monkeypatch):
    """`kedro clean | less` would block every start of a run until the reader has turned the page."""
    recorded.run()
    command = ["flock", "--nonblock", str(recorded.folder), "true"]
    codes: list[int] = []
    monkeypatch.setattr(click, "echo", lambda *_, **__: codes.append(subprocess.run(command).returncode))
    kedro(recorded.folder, "clean", "--keep", "0")
    assert len(codes) > 3
    assert set(codes) == {0}


@pytest.mark.slow
def test_what_was_deleted_is_told_though_the_rest_cannot_be(kedro: Kedro, recorded: Recorded, monkeypatch):
    first, second = recorded.run(), recorded.run()
    remove = shutil.rmtree

    def fails(folder: Path) -> None:
        if first in str(folder):
            raise PermissionError(13, "Permission denied", str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", fails)
    result = kedro(recorded.folder, "clean", "--keep", "0", "--yes")
    assert result.exit_code == 1
    named = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("MLflow run")]
    assert named == [second, first]
    assert "Error: kedro clean did not finish: [Errno 13] Permission denied" in result.stderr


@pytest.mark.slow
def test_a_project_that_was_moved_keeps_and_deletes_the_same(kedro: Kedro, recorded: Recorded):
    versions = [recorded.version("sft_policy", version) for version in VERSIONS]
    read, old, failed = recorded.run(writes=versions[0]), recorded.run(writes=versions[1]), recorded.run("FAILED")
    newest = recorded.run(reads=versions[0])
    recorded.logged_model(old)
    before = cleaned(kedro, recorded.folder, "--keep", "1")
    recorded.folder = recorded.folder.rename(recorded.folder.parent / "moved")
    recorded.models = recorded.folder / "data" / "06_models"
    lines = cleaned(kedro, recorded.folder, "--keep", "1")
    assert lines[-len(before) :] == before  # before them it says that the project was moved
    lines = cleaned(kedro, recorded.folder, "--keep", "1", "--yes")
    recorded.client = MlflowClient(f"sqlite:///{recorded.folder / 'mlflow.db'}")
    assert recorded.left() == {read, failed, newest}
    assert not (recorded.models / "sft_policy" / VERSIONS[1]).exists()
    assert not list((recorded.folder / "mlartifacts" / "models").iterdir())
    assert lines[-1] == "Kept: 1 newest, 1 to be resumed, 1 read by another run."


def test_nothing_outside_the_project_and_nothing_of_an_unknown_run_is_deleted(kedro: Kedro, recorded: Recorded):
    outside = recorded.folder.parent / "elsewhere"
    outside.mkdir()
    recorded.models.mkdir()
    (recorded.models / "sft_policy").symlink_to(outside)
    version = recorded.version("sft_policy", VERSIONS[0])
    recorded.version("sft_policy", VERSIONS[1])
    old = recorded.run(writes=version)
    recorded.run(environment="test")
    unknown = recorded.models / "ppo_checkpoints" / "untracked-vm-1"
    unknown.mkdir()
    lines = cleaned(kedro, recorded.folder, "--keep", "0", "--yes")
    assert recorded.client.get_run(old).info.lifecycle_stage == "deleted"
    assert unknown.is_dir()
    assert (outside / VERSIONS[0] / "config.json").is_file()
    assert (
        lines[-1]
        == "Kept: 1 of other environments, 1 folders of runs that MLflow does not know, 1 folders outside the project."
    )


@pytest.mark.slow
def test_caches_go_if_no_run_read_them_for_a_day(kedro: Kedro, recorded: Recorded):
    tables, days_ago = recorded.folder / "data/02_intermediate/tables", time.time() - 2 * 86_400
    for folder in ("json/default-old", "json/default-new", "owner___name/default", "../gguf/old", "../gguf/new"):
        (tables / folder / "0.0.0").mkdir(parents=True)
        table = tables / folder / "0.0.0" / "train.arrow"
        table.write_bytes(bytes(2_000_000))
        if not folder.endswith("new"):
            os.utime(table, (days_ago, days_ago))
    lines = cleaned(kedro, recorded.folder)
    assert "       2.0 MB  data/02_intermediate/tables/json/default-old" in lines
    assert "       2.0 MB  data/02_intermediate/gguf/old" in lines
    assert "0 runs, 2 caches, 4.0 MB: kedro clean --yes deletes them." in lines
    cleaned(kedro, recorded.folder, "--yes")
    assert {folder.name for folder in tables.glob("*/*")} == {"default-new", "default"}
    assert {folder.name for folder in (tables.parent / "gguf").iterdir()} == {"new"}


def test_without_a_tracking_database_there_is_nothing_to_clean(kedro: Kedro, project: Path):
    (project / "mlflow.db").unlink()
    result = kedro(project, "clean", "--yes")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: There is no run yet: ")
    assert "`kedro run --env demo`" in kedro(project, "clean", "--env", "demo").stderr
    assert not (project / "mlflow.db").exists()
