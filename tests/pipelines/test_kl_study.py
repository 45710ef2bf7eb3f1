"""The runs in MLflow of a study's trainings."""

import signal
from pathlib import Path

import mlflow
import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.pipelines.kl_study.child_run import child_runs
from ppo_rlhf.signals import RunInterruptedError


def test_runs_below_a_study_stay_in_its_store_whatever_a_reward_function_does_to_mlflow(
    tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None
):
    (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    with mlflow.start_run(experiment_id="0") as parent:  # whatever experiment an earlier test has left
        child_run = child_runs()
        for name in ("first", "second"):
            with child_run(name, PPOConfig(kl_coef=0.25)) as log:
                log(1, {"objective/kl": 1.0})
                mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'other.db'}")  # as a reward function may
                log(2, {"objective/kl": 2.0})
        with pytest.raises(RunInterruptedError), child_run("third", PPOConfig()):
            raise RunInterruptedError(signal.SIGTERM)
        mlflow.set_tracking_uri(store)
    client = mlflow.MlflowClient(store)
    runs = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    ends = {run.info.run_name: run.info.status for run in runs}
    assert ends == {"first": "FINISHED", "second": "FINISHED", "third": "KILLED"}
    for run in runs[1:]:
        points = client.get_metric_history(run.info.run_id, "objective/kl")
        assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 2.0)]
        assert run.data.params["ppo.kl_coef"] == "0.25"
    assert not (tmp_path / "other.db").exists()


def test_without_a_run_the_trainings_of_a_study_log_nothing(tmp_path: Path, no_mlflow_left_over: None):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with child_runs()("first", PPOConfig()) as log:
        log(1, {"objective/kl": 1.0})
    assert not list(tmp_path.iterdir())
