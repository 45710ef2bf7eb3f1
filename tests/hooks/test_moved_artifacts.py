"""A project that was moved or copied finds its artifacts, and writes new ones beside its database."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path

from ppo_rlhf.hooks.moved_artifacts import follow_artifacts

pytestmark = pytest.mark.usefixtures("no_mlflow_left_over")


class Store:
    """MLflow's database in a project's folder, as a run makes it, with one run, and one logged and registered model."""

    def __init__(self, project: Path, database: Path, artifacts: Path | None = None) -> None:
        project.mkdir()
        shutil.copy(database, project / "mlflow.db")
        self.project = project
        mlflow.set_tracking_uri(self.uri)  # of which MLflow's registry asks for the logged model
        self.client = MlflowClient(self.uri)
        experiment = self.client.create_experiment("ppo_rlhf", str(artifacts or project / "mlartifacts"))
        self.run = self.client.create_run(experiment).info.run_id
        self.client.log_text(self.run, "a report", "report.html")
        self.model = self.client.create_logged_model(experiment, "policy", source_run_id=self.run).model_id
        (project / "weights").write_text("")
        self.client.log_model_artifact(self.model, str(project / "weights"))
        self.client.create_registered_model("aligned")
        self.client.create_model_version("aligned", f"models:/{self.model}", self.run)

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.project / 'mlflow.db'}"

    def places(self) -> list[str]:
        """Where MLflow looks for the artifacts of a new run, of the run, of the model and of its version."""
        self.client = MlflowClient(self.uri)
        experiment = self.client.get_experiment_by_name("ppo_rlhf")
        assert experiment is not None
        version = self.client.get_model_version_download_uri("aligned", "1")
        model = self.client.get_logged_model(self.model).artifact_location
        uris = experiment.artifact_location, self.client.get_run(self.run).info.artifact_uri, model, version
        return [local_file_uri_to_path(uri) for uri in uris]

    def follow(self) -> None:
        follow_artifacts(self.uri, str(self.project / "mlartifacts"))


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_project_finds_and_writes_its_artifacts_where_it_is_now(tmp_path: Path, migrated_database: Path, how: str):
    store = Store(tmp_path / "my project", migrated_database)
    former = tmp_path / "my project" / "mlartifacts"
    inner = [f"/{store.run}/artifacts", *[f"/models/{store.model}/artifacts"] * 2]
    assert store.places() == [f"{former}{end}" for end in ("", *inner)]
    now = tmp_path / "now" / "100% mine"
    now.parent.mkdir()
    (shutil.move if how == "moved" else shutil.copytree)(store.project, now)
    store.project = now
    store.follow()
    assert store.places() == [f"{now}/mlartifacts{end}" for end in ("", *inner)]
    assert [each.path for each in store.client.list_artifacts(store.run)] == ["report.html"]
    run = store.client.create_run(store.client.get_run(store.run).info.experiment_id).info.run_id
    store.client.log_text(run, "another", "report.html")
    assert (now / "mlartifacts" / run / "artifacts" / "report.html").is_file()
    assert former.is_dir() == (how == "copied")
    assert len(list(former.glob("*"))) == (2 if how == "copied" else 0)
    store.follow()
    assert store.places() == [f"{now}/mlartifacts{end}" for end in ("", *inner)]


def test_artifacts_in_a_folder_that_the_user_chose_stay_there(tmp_path: Path, migrated_database: Path):
    disk = tmp_path / "disk" / "mlartifacts"
    store = Store(tmp_path / "project", migrated_database, disk)
    before = store.places()
    follow_artifacts(store.uri, str(disk))
    (store.project / "mlartifacts").mkdir()  # the setting was taken back, so that a folder was made here
    store.follow()
    assert store.places() == before
    assert before[0] == str(disk)
