"""Metrics on their way to MLflow: none lost, none twice."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from ppo_rlhf.hooks import metric_log
from ppo_rlhf.hooks.metric_log import MetricLog

LOG_MANY = """
import sys, mlflow
from ppo_rlhf.hooks.metric_log import MetricLog
mlflow.set_tracking_uri(sys.argv[1])
log = MetricLog(sys.argv[2])
for step in range(100):
    log.log({f"key_{i}": float(step) for i in range(20)}, step)
    if step % 5 == 0:
        log.flush(30.0)
log.close(30.0)
"""
LONG = 30.0  # seconds, never reached


class Server:
    """A client of a server that refuses batches for a while, refuses those of one key for ever, or does not answer."""

    def __init__(self) -> None:
        self.is_down = False
        self.never_takes = ""
        self.answers = threading.Event()
        self.answers.set()
        self.taken: list[Metric] = []
        self.tags: dict[str, str] = {}

    def log_batch(self, run_id: str, metrics: list[Metric], *, synchronous: bool) -> None:
        assert synchronous
        self.answers.wait()
        if self.is_down or any(metric.key == self.never_takes for metric in metrics):
            raise MlflowException("the disk is full\n[SQL: INSERT INTO metrics]")
        self.taken += metrics

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.tags[name] = value

    def steps(self) -> list[int]:
        return [metric.step for metric in self.taken]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setattr(metric_log, "MlflowClient", lambda: server)
    yield server
    server.answers.set()


@pytest.fixture
def store(tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None) -> Callable[[], str]:
    """Return a function that makes a run in a store of this test's own."""
    database = tmp_path / "mlflow.db"
    database.write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    experiment = MlflowClient().create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    return lambda: MlflowClient().create_run(experiment).info.run_id


def history(run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in MlflowClient().get_metric_history(run_id, key)]


def test_nothing_waits_for_a_server_that_does_not_answer_and_what_it_lacks_is_said(
    server: Server, caplog: pytest.LogCaptureFixture
):
    log = MetricLog("run")
    server.answers.clear()
    for step in range(3):
        log.log({"a": 1.0, "b": 2.0}, step)
    log.flush(0.01)
    assert server.taken == []
    log.close(0.01)
    assert caplog.messages == ["MLflow lacks 6 metrics of run run, for: it does not answer"]


def test_a_server_that_answers_late_gets_everything_in_order(server: Server, caplog: pytest.LogCaptureFixture):
    log = MetricLog("run")
    server.answers.clear()
    for step in range(5):
        log.log({"a": 1.0}, step)
    server.answers.set()
    log.close(LONG)
    assert server.steps() == [0, 1, 2, 3, 4]
    assert caplog.messages == []


def test_what_a_server_never_takes_holds_nothing_up(server: Server, caplog: pytest.LogCaptureFixture):
    log = MetricLog("run")
    server.never_takes, server.is_down = "bad", True
    for step in range(4):
        log.log({"bad" if step == 0 else "a": 1.0}, step)
        log.flush(LONG)
    server.is_down = False
    log.log({"a": 1.0}, 4)
    log.close(LONG)
    assert sorted(server.steps()) == [1, 2, 3, 4]
    assert caplog.messages[-1] == "MLflow lacks 1 metrics of run run, for: the disk is full"


def test_a_long_history_is_sent_whole_however_little_is_kept_of_what_is_refused(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(metric_log, "MOST_KEPT", 10)
    log = MetricLog("run")
    log.complete([{"iteration": float(step), "a": 1.0, "b": 2.0} for step in range(2000)])
    log.close(LONG)
    assert len(server.taken) == 4000
    assert caplog.messages == []


def test_refused_metrics_are_said_once_kept_and_sent_again(server: Server, caplog: pytest.LogCaptureFixture):
    log = MetricLog("run")
    server.is_down = True
    for step in range(3):
        log.log({"a": 1.0}, step)
        log.flush(LONG)
    assert server.taken == []
    assert caplog.messages == ["MLflow did not take metrics of run run; they are sent again later: the disk is full"]
    server.is_down = False
    log.log({"a": 1.0}, 3)
    with caplog.at_level(logging.INFO):
        log.flush(LONG)
    assert sorted(server.steps()) == [0, 1, 2, 3]
    assert caplog.messages[1:] == ["MLflow takes metrics again."]
    log.close(LONG)
    assert len(caplog.messages) == 2


def test_what_was_refused_is_sent_with_the_time_it_was_measured_at(server: Server):
    """MLflow takes a metric as the same only if its time is: a server may have taken what it seemed to refuse."""
    log = MetricLog("run")
    server.is_down = True
    log.log({"a": 1.0}, 1)
    log.flush(LONG)
    (waiting,) = log._refused[0]
    server.is_down = False
    log.flush(LONG)
    assert server.taken == [waiting]


def test_refused_metrics_do_not_pile_up_without_bound_and_their_number_is_said(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(metric_log, "MOST_KEPT", 10)
    log = MetricLog("run")
    server.is_down = True
    for step in range(25):
        log.log({"a": 1.0, "b": 2.0}, step)
        log.flush(LONG)
    assert sum(map(len, log._refused)) == 10
    log.close(LONG)
    assert caplog.messages[-1] == "MLflow lacks 50 metrics of run run, for: the disk is full"


def test_a_run_that_goes_on_logs_only_what_is_not_there(store: Callable[[], str]):
    run_id = store()
    before = MetricLog(run_id)
    before.log({"a": 1.0, "time/rollout_s": 3.0, "nan": math.nan, "inf": math.inf}, 1)
    before.log_history([{"step": 1, "sft/loss": 2.0}, {"step": 2, "sft/loss": 1.5}])
    before.close(LONG)
    log = MetricLog(run_id, is_continued=True)
    log.log({"a": 1.0, "b": 5.0, "time/rollout_s": 4.0, "nan": math.nan, "inf": math.inf}, 1)
    log.log({"a": 2.0}, 2)
    log.log_history([{"step": 2, "sft/loss": 1.5}, {"step": 3, "sft/loss": 1.0}])
    log.close(LONG)
    assert history(run_id, "a") == [(1, 1.0), (2, 2.0)]
    assert history(run_id, "b") == [(1, 5.0)]
    assert history(run_id, "time/rollout_s") == [(1, 3.0)]
    assert len(history(run_id, "nan")) == len(history(run_id, "inf")) == 1
    assert sorted(history(run_id, "sft/loss")) == [(1, 2.0), (2, 1.5), (3, 1.0)]
    assert "bit_identical" not in MlflowClient().get_run(run_id).data.tags


def test_rows_measured_earlier_fill_gaps_and_are_not_logged_again(store: Callable[[], str]):
    run_id = store()
    before = MetricLog(run_id)
    before.log({"a": 1.0}, 1)
    before.close(LONG)
    log = MetricLog(run_id, is_continued=True)
    log.complete([{"iteration": 1.0, "a": 1.0, "b": 3.0}, {"iteration": 2.0, "a": 2.0, "b": 4.0}])
    log.log({"a": 2.0, "b": 4.0}, 2)
    log.close(LONG)
    assert sorted(history(run_id, "a")) == [(1, 1.0), (2, 2.0)]
    assert sorted(history(run_id, "b")) == [(1, 3.0), (2, 4.0)]
    assert history(run_id, "iteration") == []


@pytest.mark.parametrize(("now", "is_repeatable"), [(1.0, True), (1.0000000000000002, False)])
def test_only_what_must_repeat_is_compared_and_to_the_last_bit(
    store: Callable[[], str], caplog: pytest.LogCaptureFixture, now: float, is_repeatable: bool
):
    run_id = store()
    before = MetricLog(run_id)
    before.log({"a": 1.0}, 1)
    before.close(LONG)
    log = MetricLog(run_id, is_continued=True)
    log.log({"a": now}, 1, is_repeatable=is_repeatable)
    assert caplog.messages == []
    log.log({"a": 1.0000000000000002}, 1)
    log.log({"a": 7.0}, 1)
    assert [line.startswith("This run does not repeat") for line in caplog.messages] == [True]
    log.flush(LONG)
    assert MlflowClient().get_run(run_id).data.tags["bit_identical"] == "false"
    log.close(LONG)
    assert history(run_id, "a") == [(1, 1.0)]


def test_processes_that_share_one_database_lose_nothing(store: Callable[[], str]):
    runs = [store() for _ in range(3)]
    arguments = [sys.executable, "-c", LOG_MANY, mlflow.get_tracking_uri()]
    processes = [subprocess.Popen([*arguments, run_id], stderr=subprocess.DEVNULL) for run_id in runs]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    for run_id in runs:
        for key in ("key_0", "key_19"):
            assert sorted(history(run_id, key)) == [(step, float(step)) for step in range(100)]


def test_a_store_that_refuses_for_a_while_has_everything_in_the_end(store: Callable[[], str]):
    run_id = store()
    path = mlflow.get_tracking_uri().removeprefix("sqlite:///")
    log = MetricLog(run_id)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'full'); END")
        log.log({"a": 1.0}, 1)
        log.flush(LONG)
        database.execute("DROP TRIGGER full")
    log.log({"a": 2.0}, 2)
    log.close(LONG)
    assert sorted(history(run_id, "a")) == [(1, 1.0), (2, 2.0)]
