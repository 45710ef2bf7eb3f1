"""Samples in MLflow: tables of bounded size, none twice, and a torn one is no end."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from ppo_rlhf.hooks import sample_log
from ppo_rlhf.hooks.sample_log import ITERATIONS_PER_TABLE, SampleLog


@pytest.fixture
def run_id(tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None) -> str:
    database = tmp_path / "mlflow.db"
    database.write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    experiment = MlflowClient().create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    return MlflowClient().create_run(experiment).info.run_id


LONG = 30.0  # seconds, never reached


def log_samples(log: SampleLog, *iterations: int) -> None:
    for iteration in iterations:
        log.log(iteration, sample(iteration))
    log.close(LONG)


def sample(iteration: int) -> dict[str, list[object]]:
    return {"prompt": ["a/b", "ü"], "score": [iteration / 4, float("nan")], "stopped": [True, False]}


def folder(run_id: str) -> Path:
    return Path(MlflowClient().get_run(run_id).info.artifact_uri)


def iterations(run_id: str, name: str) -> list[int]:
    experiment = MlflowClient().get_run(run_id).info.experiment_id
    table = MlflowClient().load_table(experiment, name, run_ids=[run_id])
    return sorted(set(table["iteration"].tolist()))


def test_a_table_reads_back_as_it_was_logged(run_id: str):
    log_samples(SampleLog(run_id), 1)
    experiment = MlflowClient().get_run(run_id).info.experiment_id
    table = MlflowClient().load_table(experiment, "samples.json", run_ids=[run_id])
    assert table.columns.tolist() == ["iteration", "prompt", "score", "stopped"]
    assert table["prompt"].tolist() == ["a/b", "ü"]
    assert table["score"].isna().tolist() == [False, True]
    assert table["stopped"].tolist() == [True, False]


def test_after_fifty_iterations_another_table_begins_and_older_ones_are_left_alone(run_id: str):
    log = SampleLog(run_id)
    log_samples(log, *range(5, 5 * (2 * ITERATIONS_PER_TABLE + 3), 5))
    names = ["samples.json", "samples_from_255.json", "samples_from_505.json"]
    assert sorted(path.name for path in folder(run_id).iterdir()) == names
    assert iterations(run_id, names[0]) == list(range(5, 255, 5))
    assert iterations(run_id, names[1]) == list(range(255, 505, 5))
    assert iterations(run_id, names[2]) == [505, 510]
    assert len(log._rows["prompt"]) == 4  # what is kept in memory, and written with the next one


def test_a_run_that_goes_on_logs_no_iteration_twice(run_id: str):
    log = SampleLog(run_id)
    log_samples(log, *range(1, 56))
    log = SampleLog(run_id, is_continued=True)
    log_samples(log, *range(40, 58))
    assert iterations(run_id, "samples.json") == list(range(1, 51))
    assert iterations(run_id, "samples_from_51.json") == list(range(51, 58))
    rows = json.loads((folder(run_id) / "samples_from_51.json").read_text())["data"]
    assert len(rows) == 2 * 7


def test_a_torn_table_is_named_and_left_and_the_run_goes_on_in_another(run_id: str, caplog: pytest.LogCaptureFixture):
    log_samples(SampleLog(run_id), 1)
    torn = folder(run_id) / "samples.json"
    torn.write_text(torn.read_text()[:40])
    log = SampleLog(run_id, is_continued=True)
    assert "samples.json of MLflow run" in caplog.text
    log_samples(log, 2, 3)
    assert torn.read_text()[-1] != "}"
    assert iterations(run_id, "samples_from_2.json") == [2, 3]


def test_a_process_killed_while_it_writes_leaves_the_table_as_it_was(run_id: str, monkeypatch: pytest.MonkeyPatch):
    log = SampleLog(run_id)
    log_samples(log, 1)
    monkeypatch.setattr(sample_log.os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        log._write("samples.json", "another table")
    assert iterations(run_id, "samples.json") == [1]


def test_samples_that_the_store_refuses_are_said_once_and_written_with_the_next(
    run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    log = SampleLog(run_id)
    with monkeypatch.context() as patched:
        patched.setattr(sample_log.os, "replace", full)
        for iteration in (1, 2):
            log.log(iteration, sample(iteration))
            log._background.wait(LONG)
    (said,) = caplog.messages
    assert said.endswith("did not take samples.json, which is written again later: [Errno 28] No space left on device")
    log_samples(log, 3)
    assert iterations(run_id, "samples.json") == [1, 2, 3]
    assert len(caplog.messages) == 1


def test_a_table_that_the_store_never_takes_holds_up_no_newer_one(
    run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sample_log, "ITERATIONS_PER_TABLE", 1)
    write = SampleLog._write

    def but_for_the_first(log: SampleLog, name: str, text: str) -> None:
        if name == "samples.json":
            raise OSError(27, "File too large")
        write(log, name, text)

    monkeypatch.setattr(SampleLog, "_write", but_for_the_first)
    log = SampleLog(run_id)
    log_samples(log, 1, 2, 3)
    assert [iterations(run_id, f"samples_from_{start}.json") for start in (2, 3)] == [[2], [3]]
    log.close(LONG)
    assert caplog.messages[-1] == f"MLflow lacks samples of run {run_id}: samples.json"


def test_samples_wait_for_a_store_that_takes_none_and_are_named_in_the_end(
    run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Tables that came before the newest one wait, too."""
    monkeypatch.setattr(sample_log, "ITERATIONS_PER_TABLE", 2)
    log, answers, write = SampleLog(run_id), threading.Event(), SampleLog._write
    monkeypatch.setattr(SampleLog, "_write", lambda *call: (answers.wait(), write(*call)))
    for iteration in range(1, 6):
        log.log(iteration, sample(iteration))
    answers.set()
    log.close(LONG)
    assert [iterations(run_id, f"samples{end}.json") for end in ("", "_from_3", "_from_5")] == [[1, 2], [3, 4], [5]]
    answers.clear()
    for iteration in (6, 7):
        log.log(iteration, sample(iteration))
    log.close(0.01)
    answers.set()
    log._background.wait(LONG)
    assert not (folder(run_id) / "samples_from_7.json").exists()  # what was given up stays away
    assert caplog.messages == [f"MLflow lacks samples of run {run_id}: samples_from_5.json, samples_from_7.json"]


def test_the_tag_that_names_the_tables_never_grows_beyond_what_mlflow_keeps(
    run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sample_log, "ITERATIONS_PER_TABLE", 1)
    monkeypatch.setattr(sample_log, "MAX_TAG_VAL_LENGTH", 120)
    log = SampleLog(run_id)
    log_samples(log, *range(1, 6))
    tag = MlflowClient().get_run(run_id).data.tags["mlflow.loggedArtifacts"]
    assert [table["path"] for table in json.loads(tag)] == ["samples.json", "samples_from_2.json"]
    assert len(list(folder(run_id).iterdir())) == 5
