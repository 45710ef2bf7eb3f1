"""The records of a run in MLflow; with tracking disabled there are none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import Result
from kedro.config import OmegaConfigLoader
from kedro.framework.hooks import hook_impl
from kedro.framework.startup import bootstrap_project
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import Engine

from ppo_rlhf import __version__
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.hooks import model_log, run_log, tracking_store
from ppo_rlhf.hooks import tracking as mlflow_hook
from ppo_rlhf.hooks.run_description import RunDescription, _git_tags, flattened, pipeline_names, verdict_of
from ppo_rlhf.hooks.tracking_store import place_in_project
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runner import LoopSession

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


def test_the_run_is_finished_and_named_after_what_was_set_its_model_and_the_time(tracked: TrackedRun):
    assert tracked.run.info.status == "FINISHED"
    assert re.fullmatch(r"\w+ · kl_coef=0.25 seed=11 · sft_policy · \d\d-\d\d \d\d:\d\d", tracked.run.info.run_name)
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
        {
            "type": "function",
            "weight": 0.5,
            "path": None,
            "function": "toy_ppo.rewards:brevity",
            "llm": None,
            "name": None,
        }
    ]
    assert "ppo" not in params  # kedro-mlflow's one string for the whole group
    assert params["ppo.sft_model_path"] == str(tracked.project / "data/06_models/sft_policy")
    assert params["ppo.reward_model_path"] == "None"  # the reward is a function


def test_the_data_are_inputs_of_the_run(tracked: TrackedRun):
    (data,) = tracked.run.inputs.dataset_inputs
    prompts = tracked.project / "data" / "01_raw" / "prompts.jsonl"
    assert (data.dataset.name, json.loads(data.dataset.source)) == ("raw_prompts", {"uri": str(prompts)})
    assert data.dataset.digest == hashlib.sha256(prompts.read_bytes()).hexdigest()[:8]
    assert [(tag.key, tag.value) for tag in data.tags] == [("mlflow.data.context", "training")]


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
    assert tags["ppo.not_default"] == "kl_coef=0.25, total_episodes=24, seed=11, save_total_limit=3"
    assert tags["set"] == "kl_coef=0.25 seed=11"
    assert [name for name, value in tags.items() if re.search(r"'|<|\bTrue\b|\bNone\b", value)] == []
    policy = next((tracked.project / "data" / "06_models" / "ppo_policy").iterdir())
    assert tags[f"written.ppo_policy.{policy.name}"] == f"data/06_models/ppo_policy/{policy.name}"
    versions = f"python {platform.python_version()}, ppo_rlhf {__version__}, kedro "
    assert tags["versions"].startswith(versions)
    assert {name for name in tags if not name.startswith(("mlflow.", "data.", "written."))} == {
        *("checkpoints", "environment", "git.commit", "git.dirty", "host", "launch.processes", "pipeline"),
        *("ppo.not_default", "project_path", "seed", "set", "standard_errors", "versions"),
    }


def test_metrics_lie_at_the_iteration_that_they_measured(tracked: TrackedRun):
    assert tracked.history("objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert tracked.history("episode") == [(1, 8.0), (2, 16.0), (3, 24.0)]
    assert tracked.history("sft/loss") == [(1, 3.0), (2, 2.5), (3, 2.25)]  # at the optimiser steps of its stage
    assert tracked.history("sft/eval_loss") == [(3, 2.75)]


def test_the_final_evaluation_is_logged_once_at_the_last_iteration(tracked: TrackedRun):
    # Due at iteration 2 and at the end; at the end the evaluation over all prompts (0.75) stands in its place.
    assert tracked.history("eval/win_rate") == [(2, 0.5), (3, 0.75)]
    assert tracked.history("eval/reward_sft") == [(3, -1.0)]  # SFT does not change
    assert tracked.history("eval/reward_se") == [(3, 0.125)]
    assert tracked.run.data.tags["standard_errors"] == "eval/reward_sft 0.333"  # not 0.3333333333333333
    assert not any(name.endswith("_se") for name in tracked.run.data.tags)
    assert set(tracked.run.data.metrics) == {
        "at_a_glance/reward_training",
        "at_a_glance/win_rate",
        "objective/scores",
        "episode",
        "eval/win_rate",
        "eval/reward_sft",
        "eval/reward_se",
        "sft/loss",
        "sft/eval_loss",
    }


def test_samples_are_a_table_of_the_first_and_the_last_iteration_of_three(tracked: TrackedRun):
    table = mlflow.load_table("samples.json", run_ids=[tracked.run.info.run_id])
    assert table["iteration"].tolist() == [1, 1, 1, 3, 3, 3]
    assert table["prompt"].tolist()[:3] == ["the film was", "a story of", "i have seen"]
    assert table["response"].tolist()[:3] == ["answer 0", "answer 1", "answer 2"]
    assert table["score"].tolist()[:3] == [0.0, 1.0, 2.0]
    assert table["kl"].tolist()[:3] == [4.0, 4.0, 4.0]


def test_the_exported_policy_is_a_model_that_generates_with_its_metrics_linked(tracked: TrackedRun):
    """No other metrics are linked: the loss of another stage at step 3 is no metric of the policy after iteration 3."""
    (model,) = mlflow.search_logged_models(experiment_ids=[tracked.run.info.experiment_id], output_format="list")
    assert model.source_run_id == tracked.run.info.run_id
    assert [output.step for output in tracked.run.outputs.model_outputs] == [3]
    assert {m.key: m.value for m in model.metrics} == {
        "objective/scores": 0.75,
        "at_a_glance/reward_training": 0.75,
        "episode": 24.0,
        "eval/win_rate": 0.75,
        "eval/reward_sft": -1.0,
        "eval/reward_se": 0.125,
        "at_a_glance/win_rate": 0.75,
    }
    assert {m.step for m in model.metrics} == {3}
    assert model.params == tracked.run.data.params
    generator = mlflow.transformers.load_model(f"models:/{model.model_id}")
    (answer,) = generator("the film", max_new_tokens=2, do_sample=False)
    assert answer["generated_text"].startswith("the film")


def test_the_policy_is_registered_by_its_start_model_with_what_it_was_evaluated_by(tracked: TrackedRun):
    (version,) = tracked.client.search_model_versions("name = 'ppo_rlhf-sft_policy-01234567'")
    assert version.run_id == tracked.run.info.run_id
    (model,) = mlflow.search_logged_models(experiment_ids=[tracked.run.info.experiment_id], output_format="list")
    assert version.source == f"models:/{model.model_id}"
    assert version.tags == {
        "start_model": "0123456789abcdef",
        "prompts": "three",
        "judge": "the toy",
        "sampling": "none",
        "win_rate": "0.75",
        "verdict": "too_few_prompts",
    }
    assert tracked.client.get_registered_model(version.name).aliases == {}  # three prompts make no champion


def test_kedro_viz_finds_the_status_of_the_run(tracked: TrackedRun):
    events = json.loads((tracked.project / ".viz" / "kedro_pipeline_events.json").read_text())
    ran = {event["node"] for event in events if event["event"] == "after_node_run"}
    assert {"ppo.generate_rollouts", "ppo.optimise_policy", "evaluation.compare_policies"} <= ran


@pytest.mark.slow
def test_kedro_mlflow_ui_opens_the_projects_database(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []
    monkeypatch.setattr("ppo_rlhf.cli.servers.run_together", commands.append)
    (toy_project / "mlflow.db").unlink()
    result = kedro(toy_project, "mlflow", "ui")
    assert result.exit_code == 0, result.output
    (command,) = commands
    assert command[1:5] == ["-m", "mlflow", "ui", "--backend-store-uri"]
    assert command[5] == f"sqlite:///{toy_project / 'mlflow.db'}"
    assert not (toy_project / "mlflow.db").exists()  # looking at the settings opens nothing


def test_a_run_whose_pipeline_is_not_tracked_leaves_nothing(kedro: Kedro, toy_project: Path):
    (toy_project / "mlflow.db").unlink()
    settings = "tracking:\n  disable_tracking:\n    pipelines: [align]\n"
    (toy_project / "conf" / "local" / "mlflow.yml").write_text(settings)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert not (toy_project / "mlflow.db").exists()
    assert not (toy_project / "mlartifacts").exists()


def test_a_project_that_cannot_be_written_is_refused_at_once(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.stderr.startswith(f"Error: {toy_project}: no write permission")


def test_a_store_that_cannot_be_opened_is_one_line(kedro: Kedro, toy_project: Path):
    uri = f"sqlite:///{toy_project}/pyproject.toml/mlflow.db"  # below a file
    settings = f"server:\n  mlflow_tracking_uri: {uri}\n"
    (toy_project / "conf" / "local" / "mlflow.yml").write_text(settings)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    assert f"Error: mlflow.yml: the tracking store {uri} cannot be used" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_database_without_its_driver_is_one_line_also_in_a_run(kedro: Kedro, toy_project: Path):
    uri = "postgresql+pg8000://anna:secret@db/runs"
    (toy_project / "conf" / "local" / "mlflow.yml").write_text(f"server:\n  mlflow_tracking_uri: {uri}\n")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    assert re.search(
        r"^Error: postgresql\+pg8000://\*\*\*@db/runs: the database's driver is not installed ", result.stderr
    )
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_server_that_says_nothing_is_named_while_it_is_waited_for_but_not_its_password(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tracking_store, "SLOW_S", 0.1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections, but never answers
        uri = f"http://{{}}127.0.0.1:{server.getsockname()[1]}"
        settings = f"server:\n  mlflow_tracking_uri: {uri.format('me:secret@')}\n"
        (toy_project / "conf" / "local" / "mlflow.yml").write_text(settings)
        result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    assert f"The tracking store {uri.format('***@')} has not answered for 0 s." in caplog.text
    assert f"Error: mlflow.yml: the tracking store {uri.format('***@')} cannot be used" in result.stderr
    assert "secret" not in result.output + caplog.text


@pytest.mark.slow
def test_a_store_that_takes_weights_gets_more_time_before_it_is_called_slow(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A copy of 0.5 GB on a busy machine was said to be a store that does not answer."""
    log_policy = model_log.log_policy

    def slowly(*given: Any, **options: Any) -> str:
        time.sleep(1.0)
        return log_policy(*given, **options)

    monkeypatch.setattr(model_log, "log_policy", slowly)
    monkeypatch.setattr(run_log, "UPLOAD_S", 0.9)
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 0
    assert "has not answered for 1 s." in caplog.text
    assert run_log.UPLOAD_S < tracking_store.SLOW_S < tracking_store.UPLOAD_S


def test_a_failed_run_says_why(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert isinstance(result.exception, ZeroDivisionError)  # with its traceback: it is no mistake of the user's
    run = last_run(toy_project)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "ZeroDivisionError: the update went wrong"
    assert run.data.metrics["objective/scores"] == 0.25


@pytest.mark.slow
def test_a_project_without_entries_for_checkpoints_has_its_metrics_and_samples_in_mlflow(
    kedro: Kedro, toy_project: Path
):
    names = ("checkpoint", "resume_checkpoint", "evaluation_metrics", "completions")
    entries = "".join(f"{name}: {{type: kedro.io.MemoryDataset, copy_mode: assign}}\n" for name in names)
    (toy_project / "conf" / "local" / "catalog.yml").write_text(entries)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    run = last_run(toy_project)
    client = mlflow.MlflowClient()
    found = {
        key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
        for key in ("objective/scores", "eval/win_rate")
    }
    assert found == {"objective/scores": [(1, 0.25), (2, 0.5), (3, 0.75)], "eval/win_rate": [(2, 0.5), (3, 0.75)]}
    table = mlflow.load_table("samples.json", run_ids=[run.info.run_id])
    assert table["iteration"].tolist() == [1, 1, 1, 3, 3, 3]


def test_the_command_is_a_tag_as_it_was_typed(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    typed = ["run", "--env", "other", "--pipelines", "supervised_finetuning,align", "--params", "prompts.column=a b"]
    monkeypatch.setattr("sys.argv", ["/bin/kedro", *typed])
    kedro(toy_project, "run", "--pipelines", "align", "--to-nodes", "configure_ppo")
    command = "kedro run --env other --pipelines supervised_finetuning,align --params 'prompts.column=a b'"
    assert last_run(toy_project).data.tags["kedro_command"] == command


@pytest.mark.slow
def test_a_run_that_is_ended_by_what_is_no_exception_has_failed_and_says_why(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    """Kedro calls no hook for a SystemExit, and MLflow would mark a run that is still open at exit as finished."""
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    monkeypatch.setenv("TOY_ERROR", "SystemExit")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    line = "The run was ended by SystemExit: the update went wrong."
    assert result.stderr == f"Error: {line}\n"
    run = last_run(toy_project)
    assert (run.info.status, run.data.tags["error"]) == ("FAILED", f"TrainingError: {line}")
    assert mlflow.active_run() is None


@pytest.mark.slow
def test_an_error_after_the_last_node_ends_the_run_with_its_reason(toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(toy_project)
    bootstrap_project(toy_project)

    class Fails:
        @hook_impl
        def after_pipeline_run(self) -> None:
            raise SystemExit("the disk is full")

    with LoopSession.create(project_path=toy_project) as session:
        session._hook_manager.register(Fails())
        with pytest.raises(PPORLHFError, match="SystemExit: the disk is full"):
            session.run(pipeline_names=["align"])
    run = last_run(toy_project)
    assert run.info.status == "FAILED"
    assert "the disk is full" in run.data.tags["error"]
    assert run.data.metrics["objective/scores"] == 0.75


@pytest.mark.slow
def test_a_function_that_leaves_mlflow_with_another_store_experiment_and_run_does_not_break_the_run(
    kedro: Kedro, toy_project: Path, migrated_database: Path
):
    shutil.copy(migrated_database, toy_project / "other.db")
    (toy_project / "meddler.py").write_text(
        "import mlflow\n\n\ndef prepare(table):\n"
        "    if mlflow.active_run():\n"
        "        mlflow.end_run()\n"
        f"        mlflow.set_tracking_uri('sqlite:///{toy_project}/other.db')\n"
        "        mlflow.set_experiment('other')\n"
        "        mlflow.start_run()\n"
        "    return table\n"
    )
    entry = "raw_prompts:\n  type: ppo_rlhf.datasets.RecordsDataset\n  filepath: data/01_raw/prompts.jsonl\n"
    (toy_project / "conf" / "local" / "catalog.yml").write_text(f"{entry}  prepare: meddler:prepare\n")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    run = last_run(toy_project)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["objective/scores"] == 0.75
    assert len(mlflow.search_logged_models([run.info.experiment_id], output_format="list")) == 1


def refuse_to_record(project: Path, *what: str) -> None:
    """Make the store refuse some changes, as a full disk would."""
    with contextlib.closing(sqlite3.connect(project / "mlflow.db")) as database:
        for number, change in enumerate(what):
            refusal = "SELECT RAISE(ABORT, 'database or disk is full')"
            database.execute(f"CREATE TRIGGER full_{number} BEFORE {change} BEGIN {refusal}; END")
        database.commit()


@pytest.mark.slow
def test_a_run_whose_end_cannot_be_recorded_is_done_and_says_so_in_one_line(kedro: Kedro, toy_project: Path):
    refuse_to_record(toy_project, "UPDATE OF status ON runs")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.match(r"Error: .* done and saved.* mlflow\.yml: ", line)
    assert line.endswith("(sqlite3.IntegrityError) database or disk is full")
    assert mlflow.active_run() is None


@pytest.mark.slow
def test_a_signal_before_the_first_node_ends_the_run_as_killed(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    def described(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return describe(*arguments)

    describe = mlflow_hook.describe_run
    monkeypatch.setattr(mlflow_hook, "describe_run", described)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 143
    run = last_run(toy_project)
    assert run.info.status == "KILLED"
    assert run.data.tags["error"] == "RunInterruptedError: The run was stopped by SIGTERM."
    assert run.data.params["ppo.kl_coef"] == "0.05"
    assert mlflow.active_run() is None


@pytest.mark.slow
def test_a_run_does_not_wait_for_a_tracking_server_that_stops_answering(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    """The store accepts everything but metrics; at the end MLflow's timeouts are short."""
    answer, retries = threading.Event(), []
    log_batch, end_run = mlflow.MlflowClient.log_batch, mlflow.end_run

    def answer_late(client: mlflow.MlflowClient, *arguments: Any, **others: Any) -> Any:
        if others.get("metrics"):
            answer.wait(400)
        return log_batch(client, *arguments, **others)

    def end(*arguments: Any) -> None:
        retries.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
        end_run(*arguments)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", answer_late)
    monkeypatch.setattr(mlflow, "end_run", end)
    monkeypatch.setattr(run_log, "PATIENCE_AT_THE_END", 0.1)
    start = time.monotonic()
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert time.monotonic() - start < 300.0
    run = last_run(toy_project)
    assert run.info.status == "FINISHED"
    assert "objective/scores" not in run.data.metrics
    assert "the tracking store does not answer" in " ".join(result.output.split())
    assert retries[-1] == "1"
    answer.set()


@pytest.mark.slow
def test_while_a_run_is_open_no_other_one_starts_in_it(kedro: Kedro, toy_project: Path):
    mlflow.set_tracking_uri(f"sqlite:///{toy_project / 'mlflow.db'}")
    mlflow.set_experiment("ppo_rlhf")
    with mlflow.start_run() as outer:
        result = kedro(toy_project, "run", "--pipelines", "align")
        assert f"MLflow run {outer.info.run_id} is open already" in result.stderr
    assert mlflow.get_run(outer.info.run_id).data.params == {}


@pytest.mark.slow
def test_a_tracking_uri_in_the_environment_is_said_to_be_unused(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(mlflow_hook, "GIVEN_URI", "http://127.0.0.1:9")
    assert kedro(toy_project, "run", "--pipelines", "align", "--to-nodes", "configure_ppo").exit_code == 0
    assert any("MLFLOW_TRACKING_URI is not used" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("uri", "placed", "artifacts"),
    [
        ("sqlite:///mlflow.db", "sqlite:////project/mlflow.db", "/project/mlartifacts"),
        ("sqlite:////shared/mlflow.db", "sqlite:////shared/mlflow.db", "/shared/mlartifacts"),
        ("http://server:5000", "http://server:5000", None),
        ("databricks", "databricks", None),
    ],
)
def test_sqlite_files_and_their_artifacts_are_placed_and_other_stores_left(uri: str, placed: str, artifacts: str):
    settings = KedroMlflowConfig.model_validate({"server": {"mlflow_tracking_uri": uri}})
    place_in_project(settings, Path("/project"))
    assert settings.server.mlflow_tracking_uri == placed
    assert settings.tracking.experiment.create_experiment_kwargs.artifact_location == artifacts


def write_settings(project: Path, text: str) -> None:
    (project / "conf" / "local" / "mlflow.yml").write_text(text)


@pytest.mark.slow
def test_a_project_that_was_moved_without_its_artifacts_says_where_they_go_and_how_they_come_along(
    kedro: Kedro, toy_project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    align = ("run", "--pipelines", "align", "--to-nodes", "ppo.configure_ppo")
    assert kedro(toy_project, *align).exit_code == 0
    assert "Artifacts of the MLflow experiment" not in caplog.text
    moved = toy_project.rename(tmp_path / "moved")
    (moved / "mlartifacts").rmdir()
    assert kedro(moved, *align).exit_code == 0
    [line] = [line for line in caplog.messages if line.startswith("Artifacts of the MLflow experiment")]
    assert re.search(rf" ppo_rlhf go to {toy_project}/mlartifacts,.* not to {moved}/mlartifacts\.", line)
    caplog.clear()
    write_settings(moved, "tracking:\n  experiment:\n    name: moved\n")  # as the line says
    assert kedro(moved, *align).exit_code == 0
    assert "Artifacts of the MLflow experiment" not in caplog.text
    [run] = mlflow.search_runs(experiment_names=["moved"], output_format="list")
    assert run.info.artifact_uri.startswith(f"file://{moved}/mlartifacts/")


@pytest.mark.slow
def test_artifacts_that_cannot_be_written_are_refused_before_the_run(kedro: Kedro, toy_project: Path):
    (toy_project / "mlartifacts").write_text("a file where the folder would be")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 1
    assert re.fullmatch(
        rf"Error: {toy_project}/mlartifacts: MLflow's artifacts cannot be written: File exists\. .*name.*\n",
        result.stderr,
    )
    mlflow.set_tracking_uri(f"sqlite:///{toy_project / 'mlflow.db'}")
    assert mlflow.search_runs(search_all_experiments=True, output_format="list") == []


def test_a_changed_file_makes_the_commit_dirty(tmp_path: Path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    assert _git_tags(tmp_path)["git.dirty"] == "false"
    (tmp_path / "file").write_text("two")
    assert _git_tags(tmp_path)["git.dirty"] == "true"


def test_pipelines_are_named_in_one_order_whatever_kedro_makes_of_it():
    for names in (["ppo", "evaluation", "ppo"], ["evaluation", "ppo"]):
        assert pipeline_names({"pipeline_names": names}) == ["evaluation", "ppo"]
    assert pipeline_names({"pipeline_names": None}) == ["__default__"]


@pytest.mark.slow
def test_lines_of_the_log_say_which_run_it_is(kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        kedro(toy_project, "run", "--to-nodes", "configure_ppo")
    info = last_run(toy_project).info
    view = f"{info.experiment_id}/runs?viewStateShareKey=ppo_rlhf"
    first = caplog.messages.index(f"MLflow run {info.run_id}, and all runs, in `kedro mlflow ui`:")
    assert caplog.messages[first + 1 : first + 3] == [
        f"http://127.0.0.1:5000/#/runs/{info.run_id}",
        f"http://127.0.0.1:5000/#/experiments/{view}",
    ]
    assert all(len(line) <= 80 for line in caplog.messages[first + 1 : first + 3])  # whole on a terminal of 100 columns


def test_the_table_of_runs_has_win_rate_reward_kl_and_what_was_set_as_columns(tracked: TrackedRun):
    tags = tracked.client.get_experiment(tracked.run.info.experiment_id).tags
    columns = [f"metrics.`at_a_glance/{name}`" for name in ("win_rate", "reward", "kl")]
    columns += ["tags.`set`", "tags.`ppo.not_default`"]
    view = json.loads(tags["mlflow.sharedViewState.ppo_rlhf"])
    assert view["selectedColumns"] == columns
    # MLflow sorts columns by name unless the view has an order, and cuts headings that are longer than their widths
    assert [column for column in view["columnOrder"] if column in columns] == columns
    assert all(view["columnWidths"][column] > 7 * len(column.partition("`")[2]) for column in columns)


def test_the_run_and_its_model_version_are_described_by_the_verdict(tracked: TrackedRun):
    said = "Too few held-out prompts to tell PPO and SFT apart (win rate 75.0 %)."
    (version,) = tracked.client.search_model_versions("name = 'ppo_rlhf-sft_policy-01234567'")
    assert tracked.run.data.tags["mlflow.note.content"] == version.description == said


@pytest.mark.parametrize(("exported", "policy"), [(20, "that of iteration 20."), (0, "SFT's.")])
def test_a_description_says_that_an_evaluation_stopped_the_run(exported: int, policy: str):
    stop = {"stopped_after": 30, "exported_iteration": exported}
    said = verdict_of({"verdict": "no_clear_difference", "eval/win_rate": 0.5, **stop})
    stopped = "evaluation.on_exploitation stopped training after iteration 30; the policy is"
    assert said.endswith(f"(win rate 50.0 %). {stopped} {policy}")


@pytest.mark.slow
def test_an_evaluation_names_its_policy_and_links_the_run_that_trained_it(kedro: Kedro, toy_project: Path):
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 0
    (policy,) = (toy_project / "data" / "06_models" / "ppo_policy").iterdir()
    (policy / "README.md").write_text("- MLflow run: `0123abcd`\n")
    assert kedro(toy_project, "run", "--pipelines", "evaluation").exit_code == 0
    run = last_run(toy_project)
    assert run.info.run_name.startswith("evaluation · ppo_policy · ")
    assert run.data.tags["mlflow.note.content"].endswith(f"Policy: {policy} of run [0123abcd](#/runs/0123abcd)")


def test_a_report_drawn_anew_is_no_run_of_its_own():
    loader = OmegaConfigLoader(str(Path(__file__).parents[2] / "conf"), base_env="base", default_run_env="base")
    loader.config_patterns["mlflow"] = ["mlflow*"]
    assert loader["mlflow"]["tracking"]["disable_tracking"]["pipelines"] == ["reporting"]


@pytest.mark.slow
def test_of_two_first_runs_of_a_project_the_later_one_takes_the_experiment_that_the_other_has_created(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    create = mlflow.MlflowClient.create_experiment

    def is_late(client: mlflow.MlflowClient, name: str, *given: Any, **options: Any) -> str:
        create(client, name, *given, **options)  # by the other run, after this one looked for the experiment
        return create(client, name, *given, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "create_experiment", is_late)
    result = kedro(toy_project, "run")
    assert result.exit_code == 0, result.output
    assert last_run(toy_project).info.status == "FINISHED"


@pytest.mark.slow
def test_system_metrics_are_a_setting_of_mlflow_yml(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    (toy_project / "conf" / "local" / "mlflow.yml").write_text("system_metrics: true\n")
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 0
    assert any(key.startswith("system/") for key in last_run(toy_project).data.metrics)


def test_params_are_values_as_json_has_them_and_texts_in_mlflow():
    """Lists and mappings become JSON there, and single values keep their name."""
    found = flattened("plain", {"a": 1, "b": [1, 2], "c": {"d": None}})
    assert found == {"plain.a": 1, "plain.b": [1, 2], "plain.c": {"d": None}}
    assert RunDescription(found, {}).texts == {"plain.a": "1", "plain.b": "[1, 2]", "plain.c": '{"d": null}'}
    assert flattened("number", 3) == {"number": 3}
    model = {"type": "model", "weight": 1.0, "path": None, "function": None, "llm": None, "name": None}
    reward = {"reward.components": [model], "reward.combine": "sum", "reward.normalise": "total"}
    assert flattened("reward", RewardConfig(components=[{"type": "model"}])) == reward


def test_a_signal_stops_a_run_at_once_that_waits_for_its_store(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    waited: list[bool] = []

    def wait(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        waited.append(True)

    monkeypatch.setattr(KedroMlflowConfig, "setup", wait)
    assert kedro(toy_project, "run", "--pipelines", "align").exit_code == 143
    assert waited == []


@pytest.mark.slow
def test_a_database_that_is_being_made_has_another_name(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that is killed must not leave half a database, which MLflow would refuse in every later run."""
    (toy_project / "mlflow.db").unlink()
    seen: list[Path] = []

    def fail(engine: Engine) -> None:
        seen.extend(toy_project.glob("*.db"))
        raise MlflowException("no more")

    monkeypatch.setattr("mlflow.store.db.utils._upgrade_db", fail)
    assert "mlflow.db cannot be used: no more" in kedro(toy_project, "run", "--pipelines", "align").stderr
    assert seen == []
    assert not list(toy_project.glob(".mlflow.db*"))


@pytest.mark.slow
def test_a_signal_ends_a_start_that_waits_for_another_one(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    @contextlib.contextmanager
    def waits(folder: Path) -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    monkeypatch.setattr(mlflow_hook, "one_at_a_time", waits)
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 143
    assert not mlflow.MlflowClient(f"sqlite:///{toy_project / 'mlflow.db'}").search_runs(["0", "1"])


@pytest.mark.slow
def test_a_full_disk_while_a_run_fails_does_not_hide_why_it_failed(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    refuse_to_record(toy_project, "UPDATE OF status ON runs", "INSERT ON metrics")
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    result = kedro(toy_project, "run", "--pipelines", "align")
    assert isinstance(result.exception, ZeroDivisionError)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(line.endswith("run ended: (sqlite3.IntegrityError) database or disk is full") for line in said)
    (lost,) = [line for line in said if "MLflow lacks 1 lines of metrics.jsonl, from iteration 1 on" in line]
    assert "(sqlite3.IntegrityError) database or disk is full" in lost
    assert not any(record.exc_info for record in caplog.records if record.name.startswith("mlflow"))


@pytest.mark.slow
def test_what_is_said_of_a_run_that_failed_does_not_hide_why_if_nobody_reads_it(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    monkeypatch.setattr(run_log.RunLog, "log_advice", lambda *_: sys.exit(1))
    assert isinstance(kedro(toy_project, "run", "--pipelines", "align").exception, ZeroDivisionError)
    run = last_run(toy_project)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "ZeroDivisionError: the update went wrong"


@pytest.mark.slow
def test_artifacts_of_two_projects_with_one_database_lie_beside_it(
    kedro: Kedro, toy_project: Path, tmp_path: Path, new_toy_project: Callable[[Path], Path]
):
    shared, projects = tmp_path / "shared", [toy_project, new_toy_project(tmp_path / "second")]
    shared.mkdir()
    (toy_project / "mlflow.db").rename(shared / "mlflow.db")
    for project in projects:
        write_settings(project, f"server:\n  mlflow_tracking_uri: sqlite:///{shared}/mlflow.db\n")
        result = kedro(project, "run", "--pipelines", "align")
        assert result.exit_code == 0, result.output
        assert last_run(shared).info.artifact_uri.startswith(f"file://{shared}/mlartifacts/")
        assert not (project / "mlartifacts").exists()
