"""`kedro advise` and the advice at the end of a run: the right run is read, and a problem is one line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import Result
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from sqlalchemy.exc import OperationalError

from ppo_rlhf.cli.advise import recorded_run
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.hooks.run_log import RunLog
from ppo_rlhf.runtime import progress_display
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION
from ppo_rlhf.runtime.names import EXPORTED
from tests.advice.support import config, curve, history
from tests.bare_state import bare_state
from tests.cli.support import refusal

Kedro = Callable[..., Result]
FAR = {"objective/kl": curve(30)}
EXPECTED = "1. [KL: kl_alarm] KL is 30 nats per response"
HEADLINE = "What to change first (`kedro advise` says it again):"


def client_of(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project / 'mlflow.db'}")


def record(
    project: Path,
    rows: list[dict[str, float]],
    settings: PPOConfig | None = None,
    started: int = 1000,
    experiment: str = "ppo_rlhf",
    **params: str,
) -> str:
    """A finished run as the tracking hook leaves it: each setting a param, each number a metric at its iteration."""
    client = client_of(project)
    found = client.get_experiment_by_name(experiment)
    place = found.experiment_id if found else client.create_experiment(experiment)
    run = client.create_run(place, start_time=started, run_name="align", tags={"pipeline": "align"})
    given = {f"ppo.{entry.name}": str(getattr(settings or config(), entry.name)) for entry in fields(PPOConfig)}
    client.log_batch(run.info.run_id, params=[Param(key, value) for key, value in (given | params).items()])
    metrics = [
        Metric(key, value, started, int(row["iteration"]))
        for row in rows
        for key, value in row.items()
        if key != "iteration" and value == value
    ]
    for start in range(0, len(metrics), 1000):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + 1000])
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def advised(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    result = kedro(project, "advise", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def refused(kedro: Kedro, project: Path, *arguments: str) -> str:
    return refusal(kedro, project, "advise", *arguments)


def test_the_newest_run_that_trained_is_judged(kedro: Kedro, toy_project: Path):
    record(toy_project, history(), started=1000)
    newest = record(toy_project, history(FAR), started=3000)
    record(toy_project, history(), started=2000)
    record(toy_project, [{"iteration": 1.0, "sft/loss": 2.0}], started=4000)  # did not train a policy
    record(toy_project, history(), started=5000, experiment="another")
    lines = advised(kedro, toy_project)
    assert lines[0] == f"MLflow run {newest} (align, FINISHED): iteration 40 of 40"
    assert lines[1].startswith(EXPECTED)
    assert lines[1].endswith("Raise ppo.kl_coef by about a factor of 3 (now 0.08).")
    assert len(lines) == 2
    assert mlflow.active_run() is None


def test_what_people_decided_last_about_the_policy_of_a_run_is_said(kedro: Kedro, toy_project: Path):
    run_id, client, policy = record(toy_project, history()), client_of(toy_project), "/data/ppo_policy/2026"
    client.set_tag(run_id, "written.ppo_policy.2026", policy)
    place = client.get_run(run_id).info.experiment_id
    for start, (path, said) in enumerate(
        [("/other", "lost"), (policy, "none"), (policy, "PPO beats SFT."), ("/a", "")]
    ):
        tags = {"human.policy": path, "mlflow.note.content": said}
        client.create_run(place, start_time=2000 + start, tags=tags)
    assert advised(kedro, toy_project)[1] == "By people: PPO beats SFT."


@pytest.mark.slow
def test_a_run_of_several_processes_is_judged_by_the_batch_of_all(kedro: Kedro, toy_project: Path):
    own = {"per_device_train_batch_size": "1", "gradient_accumulation_steps": "1", "num_mini_batches": "1"}
    ours = {
        f"ppo.{name}": value for name, value in {**own, "responses_per_prompt": "8", "total_episodes": "320"}.items()
    }
    run_id = record(toy_project, history(), **ours)
    client_of(toy_project).set_tag(run_id, "launch.processes", "8")
    assert advised(kedro, toy_project)[0] == f"MLflow run {run_id} (align, FINISHED): iteration 40 of 40"


@pytest.mark.slow
def test_the_trainings_of_a_large_sweep_hide_no_run_before_it(kedro: Kedro, toy_project: Path):
    run_id, client = record(toy_project, history()), client_of(toy_project)
    place = client.get_run(run_id).info.experiment_id
    for start in range(120):
        child = client.create_run(place, start_time=2000 + start, tags={MLFLOW_PARENT_RUN_ID: "sweep"})
        client.log_metric(child.info.run_id, "objective/kl", 1.0)
    assert advised(kedro, toy_project)[0].startswith(f"MLflow run {run_id} ")


@pytest.mark.slow
def test_a_run_is_judged_by_its_id_with_its_own_settings(kedro: Kedro, toy_project: Path):
    run_id = record(toy_project, history(FAR), config(kl_alarm=40.0, kl_warning=35.0), experiment="another")
    record(toy_project, history(FAR), started=3000)
    lines = advised(kedro, toy_project, "--run", run_id)
    assert lines[0].startswith(f"MLflow run {run_id} ")
    assert lines[1].startswith("Nothing to change: ")


@pytest.mark.slow
def test_an_unfinished_run_is_judged_by_what_it_has(kedro: Kedro, toy_project: Path):
    record(toy_project, history(iterations=4))
    first, second = advised(kedro, toy_project)
    assert first.endswith("iteration 4 of 40")
    assert "too early" in second


@pytest.mark.slow
def test_all_advice_is_shown_on_request(kedro: Kedro, toy_project: Path):
    spoilt = FAR | {
        "policy/approxkl_avg": curve(0.2),
        "policy/clipfrac_avg": curve(0.5),
        "response/truncated_fraction": curve(0.9),
    }
    run_id = record(toy_project, history(spoilt))
    few, many = advised(kedro, toy_project), advised(kedro, toy_project, "--all")
    assert few[-1] == "1 more after that: kedro advise --all"
    assert [line[:2] for line in many[1:]] == ["1.", "2.", "3.", "4."]
    assert advised(kedro, toy_project, "--env", "other")[-1] == "1 more after that: kedro advise --env other --all"
    assert advised(kedro, toy_project, "--run", run_id)[-1] == f"1 more after that: kedro advise --run {run_id} --all"


def test_settings_and_curves_come_back_as_they_were_logged(toy_project: Path):
    settings = config(kl_coef=0.1, missing_eos_penalty=1.5, whiten_rewards=True, stop_token_id=7, num_ppo_epochs=2)
    run_id = record(toy_project, history(FAR), settings)
    run = recorded_run(client_of(toy_project), run_id)
    assert run.config == settings
    expected = [{key: value for key, value in row.items() if value == value} for row in history(FAR)]
    assert run.history == expected


def test_of_an_iteration_that_was_done_again_the_later_values_count(toy_project: Path):
    run_id = record(toy_project, history(iterations=3))
    client = client_of(toy_project)
    for stamp, value in ((3000, 7.0), (2000, 5.0)):
        client.log_batch(run_id, metrics=[Metric("objective/kl", value, stamp, 2)])
    client.log_batch(run_id, metrics=[Metric("eval/kl", 1.0, 5000, 0)])  # a step that has only an evaluation
    kl = [row["objective/kl"] for row in recorded_run(client, run_id).history]
    assert kl[1] == 7.0
    assert len(kl) == 3


@pytest.mark.slow
def test_a_run_that_went_on_is_judged_by_the_settings_of_its_last_resume(kedro: Kedro, toy_project: Path):
    settings = config()
    run_id = record(toy_project, history(), settings)
    client = client_of(toy_project)
    tags = {"checkpoint": "none", "total_episodes": str(2 * settings.total_episodes), "kl_alarm": "40.0"}
    for name, value in (tags | {"version.torch": "1.0", "reporting.points": "5"}).items():
        client.set_tag(run_id, f"resume.{name}", value)
    assert advised(kedro, toy_project)[0].endswith("iteration 40 of 80")
    judged = recorded_run(client, run_id).config
    assert (judged.total_episodes, judged.kl_alarm) == (2 * settings.total_episodes, 40.0)


@pytest.mark.slow
def test_without_any_run_the_command_says_so_and_makes_no_store(kedro: Kedro, toy_project: Path):
    (toy_project / "mlflow.db").unlink()
    assert "mlflow.db" in refused(kedro, toy_project)
    assert not (toy_project / "mlflow.db").exists()


@pytest.mark.slow
def test_a_run_that_cannot_be_judged_is_refused(kedro: Kedro, toy_project: Path):
    assert "has trained a policy yet: `kedro run` does." in refused(kedro, toy_project)
    assert "has trained a policy yet: `kedro run --env other` does." in refused(kedro, toy_project, "--env", "other")
    untrained = record(toy_project, [{"iteration": 1.0, "sft/loss": 2.0}])
    assert "has trained a policy" in refused(kedro, toy_project)
    assert untrained in refused(kedro, toy_project, "--run", untrained)
    for unknown in ("nothing", "0" * 32, "../../etc"):
        assert unknown in refused(kedro, toy_project, "--run", unknown)
    bad = record(toy_project, history(), **{"ppo.gamma": "2.0"})
    line = refused(kedro, toy_project, "--run", bad)
    assert bad in line
    assert "ppo.gamma" in line


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("no\nroute"),
        pytest.param(OperationalError("SELECT", {}, Exception("locked")), marks=pytest.mark.slow),
    ],
)
def test_a_store_that_cannot_be_read_is_one_line(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(uri: str) -> None:
        raise error

    monkeypatch.setattr("ppo_rlhf.cli.project.MlflowClient", fail)
    line = refused(kedro, toy_project)
    assert line.startswith(
        f"Error: The run cannot be read from the tracking store sqlite:///{toy_project / 'mlflow.db'}: "
    )


@pytest.mark.slow
def test_a_run_that_trains_ends_with_the_advice(
    kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with caplog.at_level(logging.INFO):
        result = kedro(toy_project, "run", "--pipelines", "align", "--params", "ppo.vf_coef=0.5")
    assert result.exit_code == 0, result.output
    said = [record.getMessage() for record in caplog.records if record.name == "ppo_rlhf.hooks.run_log"]
    assert said[0] == HEADLINE
    assert said[1].startswith("3 iterations of the policy: too early")
    assert len(said) == 2
    of_the_setting = [record.getMessage() for record in caplog.records if "ppo.vf_coef=0.5" in record.getMessage()]
    assert [line.split(" with ")[0] for line in of_the_setting] == [
        "ppo.vf_coef=0.5 has almost no effect"
    ]  # at the start, once
    caplog.clear()
    assert kedro(toy_project, "run", "--pipelines", "supervised_finetuning").exit_code == 0
    assert not [record for record in caplog.records if record.name == "ppo_rlhf.hooks.run_log"]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ppo_rlhf.hooks.run_log"]


@pytest.fixture
def log_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., RunLog]]:
    """Make the log of a run whose MLflow is not there; the points that MLflow would get are `log.sent`."""

    def make(*outputs: str) -> RunLog:
        node = [Node(lambda: None, None, list(outputs), name="makes")] if outputs else []
        catalog = DataCatalog({"params:ppo": MemoryDataset(config(), copy_mode="assign")})
        log = RunLog("run", Pipeline(node), catalog, folder=tmp_path / "run")
        log.sent = []  # type: ignore[attr-defined]

        def send(client: Any, run_id: str, metrics: list[Any], **_: Any) -> None:
            log.sent.extend((point.key, point.value, point.step) for point in metrics)  # type: ignore[attr-defined]

        monkeypatch.setattr("mlflow.MlflowClient.log_batch", send)
        return log

    monkeypatch.setattr("ppo_rlhf.hooks.run_log.mlflow.set_tags", lambda tags: None)
    yield make
    progress_display.listeners.clear()


def write_lines(log: RunLog, rows: list[dict[str, float]]) -> None:
    """Write iterations and their evaluations to metrics.jsonl, as the checkpointer and the catalog do."""
    for row in rows:
        iteration = int(row["iteration"])
        metrics = {key: float(value) for key, value in row.items() if not key.startswith("eval/")}
        evaluated = {key: float(x) for key, x in row.items() if key.startswith("eval/") and x == x}
        log._metrics.append(ITERATION, iteration, metrics)
        if evaluated:
            log._metrics.append(EVALUATION, iteration, {"iteration": row["iteration"], **evaluated})


def test_training_metrics_and_evaluations_are_judged_together(
    log_of: Callable[..., RunLog], caplog: pytest.LogCaptureFixture
):
    log = log_of()
    write_lines(log, history({"eval/distinct_2": [0.23, 0.2, 0.15, 0.1]}))
    assert log.close(is_finished=True)
    with caplog.at_level(logging.INFO):
        log.log_advice("local")
        log.log_advice("demo")
    assert [line for line in logged(caplog) if "says it again" in line] == [
        HEADLINE,
        HEADLINE.replace("advise", "advise --env demo"),
    ]
    assert logged(caplog)[1].startswith("1. [KL: diversity_lost] eval/distinct_2 is 0.1, SFT's 0.23")
    assert len(logged(caplog)) == 4


def test_of_an_evaluation_that_is_made_again_on_all_prompts_only_its_own_metrics_are_logged(
    log_of: Callable[..., RunLog],
):
    log = log_of("evaluation_summary")
    row = {"iteration": 40.0, "eval/kl": 1.0, "eval/since_best_p": 0.5, "scores": [1.0, 2.0], "is_last": True}
    log._metrics.append(EVALUATION, 40, row)
    assert log.close(is_finished=True)
    assert log.sent == [("eval/since_best_p", 0.5, 40)]  # type: ignore[attr-defined]


def test_a_stopped_run_keeps_its_last_evaluation_and_logs_that_of_the_exported_policy_one_step_later(
    log_of: Callable[..., RunLog],
):
    log = log_of("ppo_policy", "evaluation_summary")
    state = bare_state(40, 40)
    log._metrics.append(EVALUATION, 40, {"iteration": 40.0, "eval/kl": 9.0, EXPORTED: 20.0, "is_last": True})
    state.progress.loaded_iteration = 20
    log.node_ran({"next_training_state": state}, {})
    log.node_ran({}, {"evaluation_summary": {"eval/kl": 1.0, "eval/win_rate": 0.9, "verdict": "better"}})
    assert log.close(is_finished=True)
    sent: list[tuple[str, float, int]] = log.sent  # type: ignore[attr-defined]
    assert [(value, step) for key, value, step in sent if key == "eval/kl"] == [(9.0, 40), (1.0, 41)]


def test_of_a_run_that_went_on_from_a_checkpoint_the_curves_before_it_are_judged_too(
    log_of: Callable[..., RunLog], caplog: pytest.LogCaptureFixture
):
    rows = history(FAR)
    write_lines(first := log_of(), rows[:20])
    assert first.close(is_finished=False)
    write_lines(log := log_of(), rows[20:])
    assert log.close(is_finished=True)
    with caplog.at_level(logging.INFO):
        log.log_advice()
    assert logged(caplog)[1].startswith(EXPECTED)


@pytest.mark.slow
def test_a_run_that_failed_is_judged_and_one_that_was_stopped_or_whose_reward_raised_is_not(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        monkeypatch.setenv("TOY_FAIL_AT", "3")
        kedro(toy_project, "run", "--pipelines", "align")
        assert logged(caplog)[0] == HEADLINE
        caplog.clear()
        monkeypatch.setenv("TOY_ERROR", "RewardError")
        kedro(toy_project, "run", "--pipelines", "align")
        monkeypatch.delenv("TOY_FAIL_AT")
        monkeypatch.setenv("TOY_SIGNAL_AT", "2:SIGTERM")
        kedro(toy_project, "run", "--pipelines", "align")
        assert logged(caplog) == []
