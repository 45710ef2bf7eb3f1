"""Metrics and samples reach MLflow once and in order, even if MLflow refuses some, hangs, or has some already."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ppo_rlhf.datasets.checkpoints import EvaluationLogDataset
from ppo_rlhf.hooks.mlflow_log import MlflowLog
from ppo_rlhf.hooks.run_log import RunLog
from ppo_rlhf.reporting.token_view.page import QUANTITIES
from ppo_rlhf.runtime import progress_display
from tests.bare_state import bare_state

Points = list[tuple[int, float]]


@pytest.fixture
def run_id(tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None) -> Iterator[str]:
    """A run in a store of its own."""
    (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = mlflow.create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    with mlflow.start_run(experiment_id=experiment) as run:
        yield run.info.run_id


def points(run_id: str, key: str) -> Points:
    return [(point.step, point.value) for point in MlflowClient().get_metric_history(run_id, key)]


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """While this list holds a reason, the store refuses metrics for that reason."""
    reasons: list[str] = []
    log_batch = MlflowClient.log_batch

    def refuse(client: MlflowClient, *arguments: Any, **others: Any) -> Any:
        if reasons:
            raise MlflowException(reasons[0])
        return log_batch(client, *arguments, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", refuse)
    return reasons


def test_refused_metrics_are_sent_again_and_it_is_said_once(
    run_id: str, refusals: list[str], caplog: pytest.LogCaptureFixture
):
    log = MlflowLog(run_id)
    refusals.append("no\nroute to http://me:secret@host")
    for step in (1, 2):
        log.log({"objective/scores": step / 4, "iteration": step}, step)
        assert not log.flush(10.0)
    (line,) = caplog.messages
    assert run_id in line
    assert line.endswith(": no route to http://***@host")
    refusals.clear()
    log.log({"objective/scores": 0.75}, 3)
    assert log.close(10.0)
    assert points(run_id, "objective/scores") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "iteration" not in MlflowClient().get_run(run_id).data.metrics


def test_what_is_never_taken_is_counted_at_the_end(run_id: str, refusals: list[str], caplog: pytest.LogCaptureFixture):
    refusals.append("disk is full")
    log = MlflowLog(run_id)
    log.log({"a": 1.0, "b": 2.0}, 1)
    assert not log.close(10.0)
    assert re.search(rf" 2 metrics .* 0 samples .*{run_id}: disk is full\.$", caplog.messages[-1])


@pytest.mark.parametrize("left", ["checkpoint", "nothing", "no run"])
def test_resuming_is_advised_only_if_the_run_is_there_with_a_checkpoint(
    run_id: str, refusals: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path, left: str
):
    if left != "nothing":
        (tmp_path / "iteration_000001").mkdir()
    if left != "no run":
        refusals.append("disk is full")
    log = MlflowLog("a" * 32 if left == "no run" else run_id, checkpoints=tmp_path)  # as `mlflow gc` leaves it
    log.log({"a": 1.0}, 1)
    assert not log.close(10.0)
    line = caplog.messages[-1]
    assert re.search(" 1 metrics .* 0 samples ", line)
    assert (f"`--params resume={run_id}`" in line) == ("resume=" in line) == (left == "checkpoint")


def test_nobody_waits_for_a_store_that_hangs(
    run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    answer = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: answer.wait(60))
    start = time.monotonic()
    log = MlflowLog(run_id)
    for step in range(1, 100):
        log.log({"a": 1.0}, step)
    assert not log.close(0.3)
    assert time.monotonic() - start < 20
    assert re.search(f"99 metrics .*{run_id}: the tracking store does not answer", caplog.messages[-1])
    answer.set()


def test_a_run_that_continues_sends_only_the_steps_that_mlflow_lacks(run_id: str):
    for step in (1, 3):
        MlflowClient().log_metric(run_id, "objective/scores", 9.0, step=step)
    log = MlflowLog(run_id, is_continued=True)
    for step in (1, 2, 3, 4):
        log.log({"episode": 8.0 * step, "objective/scores": 1.0}, step)
    assert log.close(10.0)
    assert points(run_id, "objective/scores") == [(1, 9.0), (3, 9.0), (2, 1.0), (4, 1.0)]
    assert points(run_id, "episode") == [(step, 8.0 * step) for step in (1, 2, 3, 4)]


def test_token_samples_are_a_page_of_their_iteration_and_none_where_none_were_due(run_id: str):
    numbers = {quantity.name: [0.5] for quantity in QUANTITIES}
    sample = {
        "prompt": "the",
        "tokens": [" film"],
        "is_policy": [True],
        "score": 1.0,
        "terminated": True,
        "numbers": numbers,
    }
    node = Node(lambda: {}, None, "token_samples", name="show_tokens")
    log = RunLog(run_id, Pipeline([node]), DataCatalog({}))
    for outputs in ({"iteration": 1, "responses": 8, "samples": [sample]}, {}):
        log.node_ran({}, {"token_samples": outputs})
    assert log.close(is_finished=True)
    assert [file.path for file in MlflowClient().list_artifacts(run_id, "token_view")] == [
        "token_view/iteration_000001.html"
    ]
    page = mlflow.artifacts.load_text(f"{mlflow.active_run().info.artifact_uri}/token_view/iteration_000001.html")
    assert page.startswith("<!doctype html>")
    assert "> film</span>" in page


def test_the_first_twenty_completions_of_a_sampled_iteration_are_a_table(run_id: str):
    rows = [
        {"iteration": 3, "prompt": f"p{i}", "completion": f"c{i}", "score": i / 4, "kl": i / 8, "stopped": i > 0}
        for i in range(24)
    ]
    log = RunLog(run_id, Pipeline([]), DataCatalog({}))
    for completions in ([{**row, "advantage": 1.0, "tokens": 4} for row in rows], []):
        log.node_ran({}, {"completions": completions})
    assert log.close(is_finished=True)
    table = mlflow.artifacts.load_dict(f"{mlflow.active_run().info.artifact_uri}/samples.json")
    assert table["columns"] == ["iteration", "prompt", "response", "score", "kl", "stopped"]
    assert len(table["data"]) == 20
    assert table["data"][19] == [3, "p19", "c19", 19 / 4, 19 / 8, True]
    assert table["data"][0][-1] is False


def test_the_table_of_samples_shows_a_chat_as_its_turns(run_id: str):
    chat = '[{"role": "user", "content": "Hi"}]'
    row = {"iteration": 1, "completion": "c", "score": 0.5, "kl": 0.0, "stopped": True, "tools": None}
    rows = [row | {"prompt": "<|user|>Hi", "prompt_chat": chat}, row | {"prompt": "plain", "prompt_chat": None}]
    log = RunLog(run_id, Pipeline([]), DataCatalog({}))
    log.node_ran({}, {"completions": rows})
    assert log.close(is_finished=True)
    table = mlflow.artifacts.load_dict(f"{mlflow.active_run().info.artifact_uri}/samples.json")
    assert [data[table["columns"].index("prompt")] for data in table["data"]] == ["User: Hi\n\nAssistant: ", "plain"]


@pytest.mark.parametrize("outputs", [["evaluation_metrics"], ["evaluation_metrics", "evaluation_summary"]])
@pytest.mark.parametrize("is_finished", [False, True], ids=["in the run that it ends", "repeated after a kill"])
def test_an_evaluation_that_stops_a_run_is_logged_alike_when_a_resumed_run_repeats_it(
    run_id: str, outputs: list[str], is_finished: bool
):
    """SFT's values, which do not change, come with the run's last evaluation only."""
    pipeline = Pipeline([Node(lambda: {}, None, name, name=name) for name in outputs])
    state = bare_state(99, 7)
    state.progress.requests.end = state.progress.requests.restore_best = is_finished
    log = RunLog(run_id, pipeline, DataCatalog({}))
    row = {"iteration": 7.0, "eval/reward": 0.5, "eval/reward_sft": 0.25, "eval/since_best_exported": 4.0}
    log.node_ran({"next_training_state": state}, {"evaluation_metrics": row})
    assert log.close(is_finished=True)
    assert points(run_id, "eval/reward") == [(7, 0.5)]
    assert points(run_id, "eval/reward_sft") == ([(7, 0.25)] if len(outputs) == 1 else [])


def test_metrics_and_evaluations_that_mlflow_lacks_are_taken_from_the_checkpoint(run_id: str, tmp_path: Path):
    MlflowClient().log_metric(run_id, "objective/scores", 0.25, step=1)
    evaluations = EvaluationLogDataset(str(tmp_path))
    for iteration in (1, 3):
        evaluations.save({"iteration": float(iteration), "eval/win_rate": 0.4})
    catalog = DataCatalog({"evaluation_metrics": evaluations})
    pipeline = Pipeline([Node(lambda: {}, None, "evaluation_metrics", name="evaluate_iteration")])
    history = [{"iteration": float(i), "objective/scores": i / 4} for i in (1, 2)]
    state = bare_state(99, 2)
    state.progress.history = history
    log = RunLog(run_id, pipeline, catalog, is_resumed=True)
    log.node_ran({}, {"training_state": state})
    assert log.close(is_finished=False)
    assert points(run_id, "objective/scores") == [(1, 0.25), (2, 0.5)]
    assert points(run_id, "eval/win_rate") == [(1, 0.4)]  # iteration 3 is behind the checkpoint


def test_a_number_at_a_glance_has_three_digits_and_the_metric_all_of_them(run_id: str):
    log = RunLog(run_id, Pipeline([]), DataCatalog({}))
    state = bare_state(99, 1)
    metrics = {"objective/kl": 4.44205198, "objective/scores": -0.0567891}
    log.node_ran({"next_training_state": state}, {"ppo_metrics": metrics})
    assert log.close(is_finished=True)
    assert points(run_id, "objective/kl") == [(1, 4.44205198)]
    assert points(run_id, "at_a_glance/kl_training") == [(1, 4.44)]
    assert points(run_id, "at_a_glance/reward_training") == [(1, -0.0568)]


def test_of_a_stage_that_a_resumed_run_leaves_out_the_curves_on_the_disk_are_sent(run_id: str, tmp_path: Path):
    MlflowClient().log_metric(run_id, "sft/loss", 3.0, step=1)
    history = JSONDataset(filepath=str(tmp_path / "sft_metrics.json"))
    history.save([{"step": 1, "sft/loss": 3.0}, {"step": 2, "sft/loss": 2.5}])
    pipeline = Pipeline([Node(lambda: [], None, "sft_metrics", name="train")])
    for is_finished, expected in ((False, [(1, 3.0)]), (True, [(1, 3.0), (2, 2.5)])):
        log = RunLog(run_id, pipeline, DataCatalog({"sft_metrics": history}), is_resumed=True)
        assert log.close(is_finished=is_finished)
        assert points(run_id, "sft/loss") == expected


def test_of_a_stage_that_is_made_anew_all_is_logged_and_of_the_others_what_is_missing(run_id: str):
    for key in ("sft/loss", "reward_model/loss"):
        MlflowClient().log_metric(run_id, key, 3.0, step=1)
    log = MlflowLog(run_id, is_continued=True)
    log.repeated = ("reward_model/",)
    log.log({"sft/loss": 2.0, "reward_model/loss": 2.0}, 1)
    assert log.close(10.0)
    assert points(run_id, "sft/loss") == [(1, 3.0)]
    assert sorted(points(run_id, "reward_model/loss")) == [(1, 2.0), (1, 3.0)]


def test_a_stage_that_is_one_node_reaches_mlflow_while_it_runs_and_once(run_id: str):
    node = Node(lambda: [], None, "sft_metrics", name="train")
    log = RunLog(run_id, Pipeline([node]), DataCatalog({}))
    rows = [{"step": 2, "sft/loss": 3.0}, {"step": 4, "sft/loss": 2.0, "sft/eval_loss": 2.5}]
    with progress_display.watching("SFT", 4) as report:
        report(2, {"sft/loss": 3.0})
        report(4, {"sft/loss": 2.0})
        report(4, {"sft/eval_loss": 2.5})
        assert log._log.flush(10.0)
        assert points(run_id, "sft/loss") == [(2, 3.0), (4, 2.0)]
    log.node_ran({}, {"sft_metrics": rows})
    assert log.close(is_finished=True)
    assert points(run_id, "sft/loss") == [(2, 3.0), (4, 2.0)]
    assert points(run_id, "sft/eval_loss") == [(4, 2.5)]
    assert not progress_display.listeners
