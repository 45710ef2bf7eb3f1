"""What a run leaves in MLflow, and that nothing is left where tracking is off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from click.testing import Result
from kedro.config import OmegaConfigLoader
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks import TrackingHook, start_up_hook, tracking, tracking_store
from ppo_rlhf.hooks.checks import check_runner, unread_local_files
from ppo_rlhf.hooks.hyperparameters import changed_settings, hyperparameters
from ppo_rlhf.hooks.provenance import git_tags
from ppo_rlhf.hooks.run_description import pipeline_names
from ppo_rlhf.hooks.run_parameters import unknown_names
from ppo_rlhf.hooks.tracking_store import settled_in_project
from ppo_rlhf.rewards.scorers import RewardConfig
from ppo_rlhf.runner import LoopRunner

Kedro = Callable[..., Result]


@dataclass
class TrackedRun:
    """A run of the whole toy chain, with its project in a git repository."""

    project: Path
    run: Run
    client: mlflow.MlflowClient
    commit: str

    def history(self, key: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in self.client.get_metric_history(self.run.info.run_id, key)]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def last_run(project: Path) -> Run:
    mlflow.set_tracking_uri(f"sqlite:///{project / 'mlflow.db'}")
    return mlflow.search_runs(experiment_names=["ppo_rlhf"], output_format="list")[0]


@pytest.fixture(scope="module")
def tracked(
    tmp_path_factory: pytest.TempPathFactory, new_toy_project: Callable[[Path], Path], kedro: Kedro
) -> Iterator[TrackedRun]:
    project = new_toy_project(tmp_path_factory.mktemp("tracked") / "toy")
    git(project, "init", "--quiet")
    git(project, "add", "conf", "src")
    git(project, "commit", "--quiet", "--message", "toy")
    result = kedro(project, "run", "--params", "ppo.kl_coef=0.25,seed=11")
    assert result.exit_code == 0, result.output
    yield TrackedRun(project, last_run(project), mlflow.MlflowClient(), git(project, "rev-parse", "HEAD").strip())
    mlflow.set_tracking_uri(None)


def test_the_run_is_finished_and_named_after_its_pipelines(tracked: TrackedRun):
    assert tracked.run.info.status == "FINISHED"
    assert tracked.run.info.run_name == "__default__"
    assert mlflow.active_run() is None


def test_each_hyperparameter_is_a_param_of_its_own_named_by_group_and_key(tracked: TrackedRun):
    params = tracked.run.data.params
    for field in fields(PPOConfig):
        assert f"ppo.{field.name}" in params
    assert params["ppo.kl_coef"] == "0.25"
    assert params["ppo.seed"] == "11"
    assert params["ppo.num_ppo_epochs"] == "4"  # a default that no file names
    assert params["prompts.column"] == "prompt"
    assert json.loads(params["reward.components"]) == [
        {"type": "function", "weight": 0.5, "function": "toy_ppo.rewards:brevity", "name": None}
    ]
    assert "ppo" not in params  # kedro-mlflow's one string for the whole group


def test_tags_say_where_the_run_came_from(tracked: TrackedRun):
    tags = tracked.run.data.tags
    prompts = tracked.project / "data" / "01_raw" / "prompts.jsonl"
    assert tags["git.commit"] == tracked.commit
    assert tags["git.dirty"] == "false"
    assert tags["pipeline"] == "__default__"
    assert tags["environment"] == "local"
    assert tags["seed"] == "11"
    assert tags["data.raw_prompts.fingerprint"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert tags["data.raw_prompts.path"] == str(prompts)
    assert tags["ppo.not_default"] == "kl_coef=0.25, total_episodes=24, seed=11, sample_interval=2"
    assert {"version.ppo_rlhf", "version.torch", "version.transformers", "version.python"} <= set(tags)


def test_metrics_lie_at_the_iteration_that_they_measured(tracked: TrackedRun):
    assert tracked.history("objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert tracked.history("episode") == [(1, 8.0), (2, 16.0), (3, 24.0)]


def test_the_final_evaluation_is_logged_once_at_the_last_iteration(tracked: TrackedRun):
    # Due at iteration 2 and at the end; at the end the evaluation over all prompts (0.75) stands in its place.
    assert tracked.history("eval/win_rate") == [(2, 0.5), (3, 0.75)]
    assert set(tracked.run.data.metrics) == {
        "objective/scores",
        "episode",
        "eval/win_rate",
        "sft/loss",
        "sft/eval_loss",
    }


def test_histories_of_other_stages_lie_at_their_optimiser_steps(tracked: TrackedRun):
    assert tracked.history("sft/loss") == [(1, 3.0), (2, 2.5)]
    assert tracked.history("sft/eval_loss") == [(2, 2.75)]


def test_samples_are_a_table_of_the_first_and_every_second_iteration(tracked: TrackedRun):
    table = mlflow.load_table("samples.json", run_ids=[tracked.run.info.run_id])
    assert table["iteration"].tolist() == [1, 1, 1, 2, 2, 2]
    assert table["prompt"].tolist()[:3] == ["the film was", "a story of", "i have seen"]
    assert table["response"].tolist()[:3] == ["answer 0", "answer 1", "answer 2"]
    assert table["score"].tolist()[:3] == [0.0, 1.0, 2.0]
    assert table["kl"].tolist()[:3] == [4.0, 4.0, 4.0]


def test_the_exported_policy_is_a_model_that_generates_with_its_metrics_linked(tracked: TrackedRun):
    (model,) = mlflow.search_logged_models(experiment_ids=[tracked.run.info.experiment_id], output_format="list")
    assert model.source_run_id == tracked.run.info.run_id
    assert {m.key: m.value for m in model.metrics if m.key.startswith("eval/")} == {"eval/win_rate": 0.75}
    generator = mlflow.transformers.load_model(f"models:/{model.model_id}")
    (answer,) = generator("the film", max_new_tokens=2, do_sample=False)
    assert answer["generated_text"].startswith("the film")


def test_database_and_artifacts_lie_in_the_projects_root(tracked: TrackedRun):
    root = tracked.project
    assert {p.name for p in root.iterdir() if p.name.startswith("ml")} == {"mlflow.db", "mlartifacts"}
    assert tracked.run.info.artifact_uri.startswith(f"file://{root}/mlartifacts")


def test_kedro_viz_finds_the_status_of_the_run(tracked: TrackedRun):
    events = json.loads((tracked.project / ".viz" / "kedro_pipeline_events.json").read_text())
    ran = {event["node"] for event in events if event["event"] == "after_node_run"}
    assert {"ppo.generate_rollouts", "ppo.optimise_policy", "evaluation.compare_policies"} <= ran


def test_telemetry_leaves_the_projects_file_alone(tracked: TrackedRun):
    assert "kedro_telemetry" not in (tracked.project / "pyproject.toml").read_text()
    assert mlflow.telemetry.get_telemetry_client() is None


def test_kedro_mlflow_ui_opens_the_projects_database(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(
        "kedro_mlflow.framework.cli.cli.subprocess", SimpleNamespace(call=lambda command: commands.append(command))
    )
    (toy_project / "mlflow.db").unlink()
    result = kedro(toy_project, "mlflow", "ui")
    assert result.exit_code == 0, result.output
    (command,) = commands
    assert command[:3] == ["mlflow", "ui", "--backend-store-uri"]
    assert command[3] == f"sqlite:///{toy_project / 'mlflow.db'}"
    assert not (toy_project / "mlflow.db").exists()  # looking at the settings opens nothing


def test_a_run_whose_pipeline_is_not_tracked_leaves_nothing(kedro: Kedro, toy_project: Path):
    (toy_project / "mlflow.db").unlink()
    settings = "tracking:\n  disable_tracking:\n    pipelines: [align]\n"
    (toy_project / "conf" / "local" / "mlflow.yml").write_text(settings)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert not (toy_project / "mlflow.db").exists()
    assert not (toy_project / "mlartifacts").exists()


def test_a_store_that_cannot_be_opened_is_one_line(kedro: Kedro, toy_project: Path):
    uri = f"sqlite:///{toy_project}/pyproject.toml/mlflow.db"  # below a file
    settings = f"server:\n  mlflow_tracking_uri: {uri}\n"
    (toy_project / "conf" / "local" / "mlflow.yml").write_text(settings)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    assert f"Error: mlflow.yml: the tracking store {uri} cannot be used" in result.stderr
    assert "Traceback" not in result.output


def test_a_server_that_says_nothing_is_named_while_it_is_waited_for_but_not_its_password(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tracking_store, "SLOW_S", 0.1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and answers none
        uri = f"http://{{}}127.0.0.1:{server.getsockname()[1]}"
        settings = f"server:\n  mlflow_tracking_uri: {uri.format('me:secret@')}\n"
        (toy_project / "conf" / "local" / "mlflow.yml").write_text(settings)
        result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    assert f"The tracking store {uri.format('me:***@')} has not answered for 0 s." in caplog.text
    assert f"Error: mlflow.yml: the tracking store {uri.format('me:***@')} cannot be used" in result.stderr
    assert "secret" not in result.output + caplog.text


def test_a_store_is_not_blamed_for_what_comes_before_and_behind_its_opening(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint to go on from is read there, which can take long."""
    running, seen = [], []
    monkeypatch.setattr(
        threading, "Timer", lambda *_: SimpleNamespace(start=lambda: running.append(1), cancel=running.clear)
    )
    whole, resumption = tracking.describe_run, TrackingHook._resumption
    monkeypatch.setattr(tracking, "describe_run", lambda *given: seen.append(list(running)) or whole(*given))
    monkeypatch.setattr(TrackingHook, "_resumption", lambda *given: seen.append(list(running)) or resumption(*given))
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert seen == [[], []]


@pytest.mark.parametrize("error", [MlflowException, SQLAlchemyError])
def test_a_store_that_cannot_be_written_is_one_line(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    def refuse(**options: object) -> None:
        raise MlflowException(
            "(sqlite3.OperationalError) attempt to write\n a readonly database\n[SQL: INSERT INTO runs"
        )

    monkeypatch.setattr(mlflow, "start_run", refuse)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.endswith("mlflow.db cannot be used: (sqlite3.OperationalError) attempt to write a readonly database")


def test_a_failed_run_says_why(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    kedro(toy_project, "run", "--pipelines", "align")
    run = last_run(toy_project)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "ZeroDivisionError: the update went wrong"
    assert run.data.metrics["objective/scores"] == 0.25


def refuse_to_record(project: Path, *what: str) -> None:
    """Make the store refuse some changes, as a full disk would."""
    with contextlib.closing(sqlite3.connect(project / "mlflow.db")) as database:
        for number, change in enumerate(what):
            refusal = "SELECT RAISE(ABORT, 'database or disk is full')"
            database.execute(f"CREATE TRIGGER full_{number} BEFORE {change} BEGIN {refusal}; END")
        database.commit()


def test_a_run_whose_end_cannot_be_recorded_is_done_and_says_so_in_one_line(kedro: Kedro, toy_project: Path):
    refuse_to_record(toy_project, "UPDATE OF status ON runs")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line == (
        f"Error: Everything is done and saved, but mlflow.yml: the tracking store sqlite:///{toy_project}/mlflow.db "
        "could not record the end: (sqlite3.IntegrityError) database or disk is full"
    )
    assert mlflow.active_run() is None


def test_a_full_disk_while_a_run_fails_does_not_hide_why_it_failed(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    refuse_to_record(toy_project, "UPDATE OF status ON runs", "INSERT ON metrics")
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert isinstance(result.exception, ZeroDivisionError)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "MLflow could not record how the run ended: (sqlite3.IntegrityError) database or disk is full" in said
    (lost,) = [line for line in said if line.startswith("MLflow lacks 2 metrics of run")]
    assert lost.endswith("for: (sqlite3.IntegrityError) database or disk is full")
    assert not any(record.exc_info for record in caplog.records if record.name.startswith("mlflow"))


def test_a_full_disk_while_a_signal_stops_a_run_leaves_its_exit_code(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    refuse_to_record(toy_project, "UPDATE OF status ON runs")
    monkeypatch.setenv("TOY_SIGNAL_AT", "2:SIGTERM")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 143
    assert "Traceback" not in result.output


def test_a_disk_that_checkpoints_do_not_fit_on_ends_the_run_as_soon_as_there_is_a_state():
    from ppo_rlhf.core.errors import CheckpointError
    from ppo_rlhf.hooks import checks

    asked: list[object] = []

    class Checkpoints:
        def check_space(self, state: object) -> None:
            asked.append(state)
            raise CheckpointError("data/06_models: 3 checkpoints do not fit")

    hook = checks.ChecksHook()
    catalog = {"checkpoint": Checkpoints()}
    hook.after_node_run(catalog=catalog, outputs={"policy": 1})
    assert asked == []
    with pytest.raises(CheckpointError, match="do not fit"):
        hook.after_node_run(catalog=catalog, outputs={"training_state": "the state"})
    assert asked == ["the state"]
    hook.after_node_run(catalog={}, outputs={"training_state": "the state"})  # nothing is saved, so nothing must fit


def test_a_signal_before_the_first_node_ends_the_run_as_killed(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    from ppo_rlhf.hooks import tracking

    def described(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return describe(*arguments)

    describe = tracking.describe_run
    monkeypatch.setattr(tracking, "describe_run", described)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 143
    run = last_run(toy_project)
    assert run.info.status == "KILLED"
    assert run.data.tags["error"].startswith("RunInterruptedError")
    assert run.data.params["ppo.kl_coef"] == "0.05"
    assert mlflow.active_run() is None


def test_of_a_stage_that_was_left_out_a_run_that_goes_on_logs_what_is_on_the_disk(toy_project: Path):
    from kedro.io import DataCatalog
    from kedro.pipeline import Node, Pipeline
    from kedro_datasets.json import JSONDataset

    from ppo_rlhf.hooks.run_log import RunLog

    mlflow.set_tracking_uri(f"sqlite:///{toy_project / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    run_id = client.create_run(client.create_experiment("test")).info.run_id
    client.log_metric(run_id, "sft/loss", 3.0, step=1)
    history = JSONDataset(filepath=str(toy_project / "sft_metrics.json"))
    history.save([{"step": 1, "sft/loss": 3.0}, {"step": 2, "sft/loss": 2.5}])
    pipeline = Pipeline([Node(lambda: [], None, "sft_metrics", name="train")])
    catalog = DataCatalog({"sft_metrics": history})
    resumption: Any = SimpleNamespace(checkpoint=None)
    RunLog(run_id, pipeline, catalog, resumption).close(is_finished=False)
    assert [point.step for point in client.get_metric_history(run_id, "sft/loss")] == [1]
    RunLog(run_id, pipeline, catalog, resumption).close(is_finished=True)
    assert [(p.step, p.value) for p in client.get_metric_history(run_id, "sft/loss")] == [(1, 3.0), (2, 2.5)]


@dataclass
class Silence:
    """A tracking server that answers everything but metrics; how patient MLflow was told to be at a run's end."""

    answers: threading.Event
    retries: list[str | None]


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silence]:
    from mlflow import MlflowClient

    from ppo_rlhf.hooks import run_log

    silence, log_batch, end_run = Silence(threading.Event(), []), MlflowClient.log_batch, mlflow.end_run

    def answer_late(client: MlflowClient, *arguments: Any, **others: Any) -> Any:
        if others.get("metrics"):
            silence.answers.wait(100)
        return log_batch(client, *arguments, **others)

    def end(*arguments: Any) -> None:
        silence.retries.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
        end_run(*arguments)

    monkeypatch.setattr(MlflowClient, "log_batch", answer_late)
    monkeypatch.setattr(mlflow, "end_run", end)
    monkeypatch.setattr(run_log, "PATIENCE_AT_THE_END", 0.1)
    yield silence
    silence.answers.set()


def test_a_run_does_not_wait_for_a_tracking_server_that_stops_answering(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, silence: Silence
):
    """Not before a checkpoint either: `PATIENCE` would show."""
    from ppo_rlhf.hooks import run_log

    monkeypatch.setattr(run_log, "PATIENCE", 60.0)
    start = time.monotonic()
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert time.monotonic() - start < 45.0
    run = last_run(toy_project)
    assert run.info.status == "FINISHED"
    assert "objective/scores" not in run.data.metrics
    assert "it does not answer" in result.output
    assert silence.retries[-1] == "1"


def test_a_run_that_fails_does_not_wait_for_it_for_long(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, silence: Silence
):
    from ppo_rlhf.hooks import run_log

    monkeypatch.setattr(run_log, "PATIENCE", 0.1)
    monkeypatch.setenv("TOY_FAIL_AT", "3")
    assert isinstance(kedro(toy_project, "run", "--pipelines", "align").exception, ZeroDivisionError)
    assert last_run(toy_project).info.status == "FAILED"
    assert silence.retries[-1] == "1"


def test_a_server_that_has_everything_is_asked_as_often_as_ever_in_the_end(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, silence: Silence
):
    from ppo_rlhf.hooks import run_log

    monkeypatch.setattr(run_log, "PATIENCE_AT_THE_END", 60.0)
    silence.answers.set()
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 0
    assert silence.retries[-1] is None


@pytest.mark.parametrize(("is_silent", "retries"), [(True, "1"), (False, None)])
def test_the_exported_policy_is_not_long_offered_to_a_server_that_does_not_take_metrics(
    *,
    kedro: Kedro,
    toy_project: Path,
    monkeypatch: pytest.MonkeyPatch,
    silence: Silence,
    is_silent: bool,
    retries: str | None,
):
    from ppo_rlhf.hooks import model_log, run_log

    offered = []
    monkeypatch.setattr(
        model_log, "log_policy", lambda *_, **__: offered.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
    )
    if not is_silent:
        monkeypatch.setattr(run_log, "PATIENCE_AT_THE_END", 60.0)
        silence.answers.set()
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 0
    assert offered == [retries]


def test_a_signal_cuts_the_wait_for_a_silent_server_behind_training(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, silence: Silence
):
    from ppo_rlhf.hooks import run_log
    from ppo_rlhf.hooks.background import Background

    wait = Background.wait

    def stopped_meanwhile(background: Background, seconds: float) -> bool:
        if seconds == 60.0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return wait(background, seconds)

    monkeypatch.setattr(run_log, "PATIENCE", 0.1)
    monkeypatch.setattr(run_log, "PATIENCE_AT_THE_END", 60.0)
    monkeypatch.setattr(Background, "wait", stopped_meanwhile)
    start = time.monotonic()
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 143
    assert time.monotonic() - start < 45.0
    assert last_run(toy_project).info.status == "KILLED"


def test_a_run_that_was_open_before_is_used_and_left_open(kedro: Kedro, toy_project: Path):
    mlflow.set_tracking_uri(f"sqlite:///{toy_project / 'mlflow.db'}")
    mlflow.set_experiment("ppo_rlhf")
    with mlflow.start_run() as outer:
        result = kedro(toy_project, "run", "--pipelines", "align")
        assert result.exit_code == 0, result.output
        assert mlflow.active_run().info.run_id == outer.info.run_id
    assert mlflow.get_run(outer.info.run_id).data.params["ppo.kl_coef"] == "0.05"


@pytest.mark.parametrize(
    ("given", "is_said"), [("http://name:secret@server:5000", True), ("sqlite:///mlflow.db", False), (None, False)]
)
def test_another_tracking_uri_in_the_environment_is_said_not_to_be_used(
    kedro: Kedro,
    toy_project: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: str | None,
    is_said: bool,
):
    from ppo_rlhf.hooks import tracking

    monkeypatch.setattr(tracking, "GIVEN_URI", given)
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 0
    said = [line for line in caplog.messages if "MLFLOW_TRACKING_URI" in line]
    assert said == ["MLFLOW_TRACKING_URI is not used: server.mlflow_tracking_uri in mlflow.yml is."] * is_said


def test_relative_sqlite_files_and_their_artifacts_are_placed_in_the_project():
    settings = {"server": {"mlflow_tracking_uri": "sqlite:///mlflow.db"}, "tracking": {"experiment": {"name": "x"}}}
    assert settled_in_project(settings, Path("/project")) == {
        "server": {"mlflow_tracking_uri": "sqlite:////project/mlflow.db"},
        "tracking": {
            "experiment": {"name": "x", "create_experiment_kwargs": {"artifact_location": "/project/mlartifacts"}}
        },
    }


@pytest.mark.parametrize("uri", ["http://server:5000", "databricks", "mlruns"])
def test_other_stores_are_left_as_they_are(uri: str):
    settings = {"server": {"mlflow_tracking_uri": uri}}
    assert settled_in_project(settings, Path("/project")) == settings


def test_lists_and_groups_become_json_and_single_values_keep_their_name():
    groups = {
        "plain": {"a": 1, "b": [1, 2], "c": {"d": None}},
        "number": 3,
        "reward": RewardConfig(components=[{"type": "model"}]),
    }
    assert hyperparameters(groups) == {
        "plain.a": "1",
        "plain.b": "[1, 2]",
        "plain.c": '{"d": null}',
        "number": "3",
        "reward.components": '[{"type": "model", "weight": 1.0, "function": null, "name": null}]',
    }


def test_settings_at_their_default_are_not_named_as_changed():
    assert changed_settings({"ppo": PPOConfig(kl_coef=0.2)}) == {"kl_coef": 0.2}
    assert changed_settings({"ppo": PPOConfig()}) == {}
    assert changed_settings({"prompts": {"column": "text"}}) == {}


def test_outside_a_git_repository_there_are_no_git_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_tags(tmp_path) == {}


def test_a_changed_file_makes_the_commit_dirty(tmp_path: Path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    assert git_tags(tmp_path)["git.dirty"] == "false"
    (tmp_path / "file").write_text("two")
    assert git_tags(tmp_path)["git.dirty"] == "true"


def test_the_best_checkpoint_is_the_best_evaluated_one_that_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from ppo_rlhf.datasets import checkpoints
    from ppo_rlhf.hooks.model_log import best_checkpoint

    monkeypatch.setattr(checkpoints.mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id="run")))
    dataset = checkpoints.CheckpointDataset(str(tmp_path))
    assert best_checkpoint(dataset, kl_alarm=20.0) is None
    assert best_checkpoint(None, kl_alarm=20.0) is None
    rows = [  # the first was pruned, the third drifted too far
        {"iteration": 10.0, "eval/judge_score": 0.9, "eval/reward": 0.0, "eval/kl": 1.0},
        {"iteration": 20.0, "eval/judge_score": 0.6, "eval/reward": 0.0, "eval/kl": 2.0},
        {"iteration": 30.0, "eval/judge_score": 0.8, "eval/reward": 0.0, "eval/kl": 30.0},
        {"iteration": 40.0, "eval/judge_score": 0.5, "eval/reward": 0.0, "eval/kl": 3.0},
    ]
    for iteration in (20, 30, 40):
        (tmp_path / "run" / f"iteration_{iteration:06d}").mkdir(parents=True)
    (tmp_path / "run" / "evaluations.json").write_text(json.dumps(rows))
    assert best_checkpoint(dataset, kl_alarm=20.0) == (tmp_path / "run" / "iteration_000020" / "policy", 20)


def loader(project: Path, **runtime_params: object) -> OmegaConfigLoader:
    return OmegaConfigLoader(
        str(project / "conf"), base_env="base", default_run_env="local", runtime_params=dict(runtime_params)
    )


def test_names_that_only_a_catalog_reads_are_known(toy_project: Path):
    (toy_project / "conf" / "local" / "catalog.yml").write_text(
        "mine:\n  type: pandas.CSVDataset\n  filepath: ${runtime_params:my_file, data/mine.csv}\n"
    )
    assert unknown_names(loader(toy_project, my_file="x", ppo={"gamma": 1.0}, seed=1)) == []


def test_where_data_lie_is_told_by_files_alone(toy_project: Path):
    """Accepted, it would be ignored: the catalog's paths are made of the globals."""
    found = unknown_names(loader(toy_project, data_root="elsewhere", seed=1))
    assert found == ["--params data_root: it is read from files alone; set it in conf/local/globals.yml."]


def test_without_run_parameters_nothing_is_unknown(toy_project: Path):
    assert unknown_names(loader(toy_project)) == []


def test_files_of_conf_local_count_as_unread_only_in_another_environment(tmp_path: Path):
    local = tmp_path / "local"
    local.mkdir()
    (local / ".gitkeep").touch()
    assert unread_local_files(tmp_path, "test") == []
    (local / "globals.yml").touch()
    assert unread_local_files(tmp_path, "test") == ["globals.yml"]
    assert unread_local_files(tmp_path, "local") == []
    assert unread_local_files(tmp_path, None) == []


def test_every_runner_is_welcome_where_there_is_no_loop():
    from kedro.pipeline import Node, Pipeline

    pipeline = Pipeline([Node(lambda: 1, None, "x", name="one")])
    check_runner(
        {"runner": "<kedro.runner.thread_runner.ThreadRunner object at 0x7f>", "only_missing_outputs": True}, pipeline
    )


def test_the_tracking_hook_takes_the_place_of_kedro_mlflows():
    from ppo_rlhf import settings

    assert any(isinstance(hook, TrackingHook) for hook in settings.HOOKS)
    assert start_up_hook in settings.HOOKS
    assert "kedro_mlflow" in settings.DISABLE_HOOKS_FOR_PLUGINS


def test_ranks_but_the_first_are_not_tracked(monkeypatch: pytest.MonkeyPatch):
    import importlib

    from ppo_rlhf import settings

    monkeypatch.setenv("RANK", "1")
    other = importlib.reload(settings)
    try:
        assert not any(isinstance(hook, TrackingHook) for hook in other.HOOKS)
        assert start_up_hook in other.HOOKS
        assert {"kedro_mlflow", "kedro-viz", "kedro-telemetry"} <= set(other.DISABLE_HOOKS_FOR_PLUGINS)
    finally:
        monkeypatch.delenv("RANK")
        importlib.reload(settings)


def test_another_runner_is_refused_for_the_loop():
    from kedro.pipeline import Node, Pipeline

    def step(state: int) -> int:
        return state

    first = Node(lambda: 1, None, "training_state", name="first")
    loop = Pipeline([first, Node(step, "training_state", "next_training_state", name="step", tags="iteration")])
    with pytest.raises(ConfigError, match=r"^ParallelRunner would run PPO's loop once .* drop --runner"):
        check_runner({"runner": "<kedro.runner.parallel_runner.ParallelRunner object at 0x7f>"}, loop)
    with pytest.raises(ConfigError, match=r"^--only-missing-outputs would train and leave out what exports the policy"):
        check_runner({"runner": "None", "only_missing_outputs": True}, loop)
    check_runner({"runner": "None", "only_missing_outputs": False}, loop)


def test_saving_in_threads_is_refused():
    with pytest.raises(ConfigError, match=r"^--async: LoopRunner saves"):
        LoopRunner(is_async=True)


def test_pipelines_are_named_in_one_order_whatever_kedro_makes_of_it():
    for names in (["ppo", "evaluation", "ppo"], ["evaluation", "ppo"]):
        assert pipeline_names({"pipeline_names": names}) == ["evaluation", "ppo"]
    assert pipeline_names({"pipeline_names": None}) == ["__default__"]


def test_lines_of_the_log_say_which_run_it_is(kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        kedro(toy_project, "run", "--to-nodes", "configure_ppo")
    assert f"MLflow run {last_run(toy_project).info.run_id} (kedro mlflow ui)" in caplog.messages
