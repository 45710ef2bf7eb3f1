"""MLflow gets each line of metrics.jsonl once and in order, whatever it refuses, and whenever the run is killed."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from ppo_rlhf.checkpoints.evaluations import write_completions
from ppo_rlhf.hooks import run_log
from ppo_rlhf.hooks.mlflow_mirror import MOST_PER_BATCH, SENT, MlflowMirror
from ppo_rlhf.hooks.run_log import RunLog
from ppo_rlhf.reporting.token_view.page import QUANTITIES
from ppo_rlhf.runtime import metrics_file, progress_display
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, Line, Mark, MetricsFile, metrics_of, read_lines
from tests.bare_state import bare_state

Points = list[tuple[int, float]]
EXPERIMENT = "test"


@pytest.fixture(params=["sqlite"])
def run_id(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    migrated_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_mlflow_left_over: None,
) -> Iterator[str]:
    """A run in a store of its own."""
    if request.param == "sqlite":
        (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    else:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    experiment = mlflow.create_experiment(EXPERIMENT, artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment(experiment_id=experiment)
    with mlflow.start_run() as run:
        yield run.info.run_id


BOTH_STORES = pytest.mark.parametrize("run_id", ["sqlite", "files"], indirect=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run's folder."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def points(run_id: str, key: str = "objective/scores") -> Points:
    return [(point.step, point.value) for point in MlflowClient().get_metric_history(run_id, key)]


def scores(*iterations: int) -> Points:
    return [(iteration, iteration / 4) for iteration in iterations]


def write(folder: Path, *iterations: int, kind: str = ITERATION) -> Mark:
    """Write lines of these iterations, and return the length of the file behind each."""
    file = MetricsFile(folder)
    for iteration in iterations:
        row = {"iteration": float(iteration), "objective/scores": iteration / 4, "episode": 8.0 * iteration}
        file.append(kind, iteration, row)
    return file.mark()


def charts(line: Line) -> dict[str, float]:
    return {key: value for key, value in line.metrics.items() if key != "iteration"}


def mirror_of(
    run_id: str, folder: Path, send_files: Callable[[MlflowClient, Line], None] = lambda client, line: None
) -> MlflowMirror:
    return MlflowMirror(run_id, folder, charts, send_files)


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


# --- what MLflow gets ------------------------------------------------------------------------------------------------


@BOTH_STORES
def test_a_point_has_the_step_and_the_time_of_its_line(run_id: str, folder: Path):
    write(folder, 1, 2, 3)
    mirror = mirror_of(run_id, folder)
    mirror.wake()
    assert mirror.close(10.0, can_resume=True)
    found = MlflowClient().get_metric_history(run_id, "objective/scores")
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert [(point.step, point.timestamp, point.value) for point in found] == [
        (line.step, line.time, line.step / 4) for line in lines
    ]
    assert "iteration" not in MlflowClient().get_run(run_id).data.metrics
    sent = json.loads((folder / SENT).read_text())
    assert sent["metrics"] == sent["files"] == {"bytes": lines[-1].end.bytes, "sha256": lines[-1].end.sha256}


def test_no_call_has_more_metrics_than_mlflow_takes_and_no_line_is_divided(
    run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    log_batch = MlflowClient.log_batch

    def note(client: MlflowClient, run: str, metrics: list[Any], **others: Any) -> Any:
        sizes.append(len(metrics))
        return log_batch(client, run, metrics, **others)

    monkeypatch.setattr(MlflowClient, "log_batch", note)
    file = MetricsFile(folder)
    for iteration in range(1, 8):
        file.append(ITERATION, iteration, {f"m{number}": 1.0 for number in range(300)})
    assert mirror_of(run_id, folder).close(30.0, can_resume=True)
    assert sizes == [900, 900, 300]
    assert MOST_PER_BATCH == 1000
    assert points(run_id, "m299") == [(iteration, 1.0) for iteration in range(1, 8)]


def test_one_more_line_is_as_much_work_after_a_thousand_as_after_ten(
    run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    digested: list[str] = []
    digest = metrics_file._digest
    monkeypatch.setattr(metrics_file, "_digest", lambda *given: (digested.append(given[1]), digest(*given))[1])
    work = []
    for length in (10, 1000):
        file = MetricsFile(folder / str(length))
        file.catch_up([{"iteration": float(number)} for number in range(1, length)])
        mirror = MlflowMirror(run_id, folder / str(length), lambda line: {"a": 1.0}, lambda client, line: None)
        assert mirror.flush(60.0)
        digested.clear()
        file.append(ITERATION, length, {"iteration": float(length)})
        assert mirror.flush(60.0)
        work.append(len(digested))
    assert work[0] == work[1]


# --- refusals and outages --------------------------------------------------------------------------------------------


def test_what_was_refused_is_sent_again_and_it_is_said_once(
    run_id: str, folder: Path, refusals: list[str], caplog: pytest.LogCaptureFixture
):
    mirror = mirror_of(run_id, folder)
    write(folder, 1)
    assert mirror.flush(10.0)
    refusals.append("no\nroute to http://me:secret@host")
    for iteration in (2, 3):
        write(folder, iteration)
        mirror.wake()
        assert not mirror.flush(10.0)
    (line,) = caplog.messages
    assert run_id in line
    assert line.endswith(": no route to http://***@host")
    refusals.clear()
    write(folder, 4)
    assert mirror.close(10.0, can_resume=True)
    assert points(run_id) == scores(1, 2, 3, 4)
    assert len(caplog.messages) == 1


def test_a_later_outage_is_said_again(run_id: str, folder: Path, refusals: list[str], caplog: pytest.LogCaptureFixture):
    mirror = mirror_of(run_id, folder)
    for iteration in (1, 2):
        refusals.append("down")
        write(folder, iteration)
        assert not mirror.flush(10.0)
        refusals.clear()
        assert mirror.flush(10.0)
    assert [line.endswith(": down") for line in caplog.messages] == [True, True]


@BOTH_STORES
def test_a_call_that_failed_after_mlflow_took_the_metrics_is_not_made_twice(
    run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a time-out of the answer."""
    log_batch, fails = MlflowClient.log_batch, [True, False, True]

    def lose_the_answer(client: MlflowClient, *arguments: Any, **others: Any) -> Any:
        log_batch(client, *arguments, **others)
        if fails and fails.pop(0):
            raise MlflowException("read timed out")

    monkeypatch.setattr(MlflowClient, "log_batch", lose_the_answer)
    mirror = mirror_of(run_id, folder)
    for iteration in range(1, 6):
        write(folder, iteration)
        mirror.flush(10.0)
    assert mirror.close(10.0, can_resume=True)
    assert points(run_id) == scores(1, 2, 3, 4, 5)


def test_nobody_waits_for_a_store_that_hangs(
    run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    answer = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: answer.wait(120))
    start = time.monotonic()
    mirror = mirror_of(run_id, folder)
    for iteration in range(1, 100):
        write(folder, iteration)
        mirror.wake()
    assert not mirror.close(0.3, can_resume=True)
    assert time.monotonic() - start < 60
    assert f"99 lines of metrics.jsonl, from iteration 1 on, of run {run_id}: the tracking store" in caplog.messages[-1]
    answer.set()


def test_a_thread_that_ends_just_after_the_last_wait_has_sent_everything(
    run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    mirror = mirror_of(run_id, folder)
    write(folder, 1)
    assert mirror.flush(10.0)
    monkeypatch.setattr(mirror, "flush", lambda _: False)
    assert mirror.close(0.3, can_resume=True)
    assert caplog.messages == []


def test_what_mlflow_lacks_at_the_end_is_said_with_the_first_line_and_the_reason(
    run_id: str, folder: Path, refusals: list[str], caplog: pytest.LogCaptureFixture
):
    mirror = mirror_of(run_id, folder)
    write(folder, 1)
    assert mirror.flush(10.0)
    refusals.append("disk is full.")
    write(folder, 2, 3)
    write(folder, 3, kind=EVALUATION)
    assert not mirror.close(10.0, can_resume=False)
    expected = rf"MLflow lacks 3 lines of metrics\.jsonl, from iteration 2 on, of run {run_id}: disk is full\."
    assert re.fullmatch(expected, caplog.messages[-1])


@pytest.mark.parametrize("left", ["a checkpoint", "nothing", "no run"])
def test_resuming_is_advised_only_if_the_run_is_there_with_a_checkpoint(
    run_id: str, folder: Path, refusals: list[str], caplog: pytest.LogCaptureFixture, left: str
):
    if left != "nothing":
        (folder / "iteration_000001").mkdir()
    if left != "no run":
        refusals.append("disk is full")
    known = "a" * 32 if left == "no run" else run_id  # `mlflow gc` deletes a run for good
    log = RunLog(known, Pipeline([]), DataCatalog({}), folder=folder, can_resume=True)
    metrics_of(folder).append(ITERATION, 1, {"a": 1.0})
    assert not log.close(is_finished=False)
    line = caplog.messages[-1]
    assert " 1 lines " in line
    assert (f"`--params resume={run_id}`" in line) == ("resume=" in line) == (left == "a checkpoint")


def test_files_that_are_refused_do_not_hold_metrics_up_and_are_sent_once_they_are_taken(
    run_id: str, folder: Path, caplog: pytest.LogCaptureFixture
):
    taken: list[int] = []
    refuses = [True]

    def send(client: MlflowClient, line: Line) -> None:
        if refuses[0] and line.step > 1:
            raise OSError("no such bucket")
        taken.append(line.step)

    mirror = mirror_of(run_id, folder, send)
    write(folder, 1, 2, 3)
    assert not mirror.flush(10.0)
    write(folder, 4)
    assert not mirror.flush(10.0)
    assert points(run_id) == scores(1, 2, 3, 4)
    assert taken == [1]
    assert [line.endswith(": no such bucket") for line in caplog.messages] == [True]
    assert not mirror.close(10.0, can_resume=True)
    assert "lacks 3 lines of metrics.jsonl, from iteration 2 on" in caplog.messages[-1]
    refuses[0] = False
    assert mirror_of(run_id, folder, send).close(10.0, can_resume=True)  # goes on from the offset
    assert taken == [1, 2, 3, 4]
    assert points(run_id) == scores(1, 2, 3, 4)


# --- a kill, and a resumed run ---------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_after_a_kill_before_the_offset_was_written_nothing_is_sent_twice_and_nothing_is_missing(
    run_id: str, folder: Path, known: int
):
    """MLflow has three lines, of which the offset knows some; a fourth one was never sent."""
    mirror = mirror_of(run_id, folder)
    for iteration in (1, 2, 3):
        mark = write(folder, iteration)
        assert mirror.flush(10.0)
        if iteration == known:
            shutil.copy(folder / SENT, folder / "earlier")
    mark = write(folder, 4)
    (folder / SENT).unlink()
    if known:
        (folder / "earlier").rename(folder / SENT)
    again = mirror_of(run_id, folder)
    again.cut(mark)
    MetricsFile(folder).cut(mark)
    write(folder, 5)
    assert again.close(10.0, can_resume=True)
    assert points(run_id) == scores(1, 2, 3, 4, 5)
    assert points(run_id, "episode") == [(iteration, 8.0 * iteration) for iteration in range(1, 6)]


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_iterations_that_mlflow_has_are_not_sent_again_when_a_resumed_run_repeats_them(
    run_id: str, folder: Path, refusals: list[str], kept: int
):
    marks = [Mark()]
    mirror = mirror_of(run_id, folder)
    for iteration in (1, 2, 3, 4):
        if iteration == 4:
            refusals.append("down")  # MLflow lacks the last one
        marks.append(write(folder, iteration))
        assert mirror.flush(10.0) == (iteration < 4)
    refusals.clear()
    for last in (kept + 1, 5):  # the first attempt to go on is interrupted, too
        again = mirror_of(run_id, folder)
        again.cut(marks[kept])
        MetricsFile(folder).cut(marks[kept])
        write(folder, *range(kept + 1, last + 1))
        assert again.close(10.0, can_resume=True)
        assert points(run_id) == scores(*range(1, max(3, last) + 1))


def test_of_stages_that_run_anew_all_is_sent_again_and_of_the_others_nothing_twice(run_id: str, folder: Path):
    mirror = mirror_of(run_id, folder)
    for attempt in (1.0, 2.0):
        again = mirror if attempt == 1.0 else mirror_of(run_id, folder)
        if attempt == 2.0:
            again.cut(Mark(), anew=("reward_model",))
            MetricsFile(folder).cut(Mark())
        for kind in ("sft", "reward_model"):
            MetricsFile(folder).append(kind, 1, {f"{kind}/loss": attempt})
        assert again.flush(10.0)
    assert points(run_id, "sft/loss") == [(1, 1.0)]
    assert points(run_id, "reward_model/loss") == [(1, 1.0), (1, 2.0)]


def test_a_step_whose_second_line_mlflow_lacks_gets_it_when_the_stage_is_repeated(run_id: str, folder: Path):
    """A stage's loss and its evaluation are two lines of one step; the run was killed in the evaluation."""
    mirror = mirror_of(run_id, folder)
    MetricsFile(folder).append("sft", 4, {"sft/loss": 2.0})
    assert mirror.flush(10.0)
    again = mirror_of(run_id, folder)
    again.cut(Mark())
    MetricsFile(folder).cut(Mark())
    for metrics in ({"sft/loss": 2.0}, {"sft/eval_loss": 2.5}):
        MetricsFile(folder).append("sft", 4, metrics)
    assert again.close(10.0, can_resume=True)
    assert points(run_id, "sft/loss") == [(4, 2.0)]
    assert points(run_id, "sft/eval_loss") == [(4, 2.5)]


def test_files_of_iterations_behind_the_checkpoint_are_sent_again_by_the_run_that_repeats_them(
    run_id: str, folder: Path
):
    """A file replaces an earlier one of its name, so sending it again changes nothing."""
    taken: list[int] = []

    def send(client: MlflowClient, line: Line) -> None:
        taken.append(line.step)

    mark = write(folder, 1)
    write(folder, 2)
    assert mirror_of(run_id, folder, send).close(10.0, can_resume=True)
    again = mirror_of(run_id, folder, send)
    again.cut(mark)
    MetricsFile(folder).cut(mark)
    write(folder, 2)
    assert again.close(10.0, can_resume=True)
    assert taken == [1, 2, 2]


# --- what the run's log writes and shows -----------------------------------------------------------------------------


def artifact(path: str) -> str:
    return f"{mlflow.active_run().info.artifact_uri}/{path}"


def test_token_samples_are_a_page_of_their_iteration_and_none_where_none_were_due(run_id: str, folder: Path):
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
    log = RunLog(run_id, Pipeline([node]), DataCatalog({}), folder=folder)
    for iteration, outputs in enumerate(({"iteration": 1, "responses": 8, "samples": [sample]}, {}), start=1):
        log.node_ran({}, {"token_samples": outputs})
        write(folder, iteration)
    assert log.close(is_finished=True)
    assert [file.path for file in MlflowClient().list_artifacts(run_id, "token_view")] == [
        "token_view/iteration_000001.html"
    ]
    page = mlflow.artifacts.load_text(artifact("token_view/iteration_000001.html"))
    assert page.startswith("<!doctype html>")
    assert "> film</span>" in page
    assert not list((folder / "token_view").iterdir())  # what MLflow has needs no room here


def completion(iteration: int, number: int, **others: Any) -> dict[str, Any]:
    row = {"iteration": iteration, "prompt": f"p{number}", "completion": f"c{number}", "score": number / 4}
    return {**row, "kl": number / 8, "stopped": number > 0, "advantage": 1.0, "tokens": 4, **others}


def test_the_first_twenty_completions_of_a_sampled_iteration_are_a_table(run_id: str, folder: Path):
    log = RunLog(run_id, Pipeline([]), DataCatalog({}), folder=folder)
    for iteration in (3, 4):
        if iteration == 3:
            write_completions(folder, [completion(3, number) for number in range(24)])
        write(folder, iteration)
    assert log.close(is_finished=True)
    table = mlflow.artifacts.load_dict(artifact("samples.json"))
    assert table["columns"] == ["iteration", "prompt", "response", "score", "kl", "stopped"]
    assert len(table["data"]) == 20
    assert table["data"][19] == [3, "p19", "c19", 19 / 4, 19 / 8, True]
    assert table["data"][0][-1] is False
    assert mlflow.load_table("samples.json", run_ids=[run_id])["response"].tolist()[:2] == ["c0", "c1"]


def test_a_table_is_full_after_some_sampled_iterations_and_all_of_them_are_in_one(
    run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A table is written anew for each of its iterations, so the bytes of an iteration have a bound."""
    monkeypatch.setattr(run_log, "ITERATIONS_PER_TABLE", 3)
    log = RunLog(run_id, Pipeline([]), DataCatalog({}), folder=folder)
    for iteration in range(10, 80, 10):
        write_completions(folder, [completion(iteration, 0), completion(iteration, 1)])
        write(folder, iteration)
        log.node_ran({}, {})
    assert log.close(is_finished=True)
    for path, iterations in (
        ("samples.json", [10, 20, 30]),
        ("samples_2.json", [40, 50, 60]),
        ("samples_3.json", [70]),
    ):
        table = mlflow.load_table(path, run_ids=[run_id])
        assert table["iteration"].tolist() == [number for number in iterations for _ in range(2)]


def test_the_table_of_samples_shows_a_chat_as_its_turns(run_id: str, folder: Path):
    chat = '[{"role": "user", "content": "Hi"}]'
    rows = [
        completion(1, 0, tools=None, prompt="<|user|>Hi", prompt_chat=chat),
        completion(1, 1, tools=None, prompt="plain", prompt_chat=None),
    ]
    log = RunLog(run_id, Pipeline([]), DataCatalog({}), folder=folder)
    write_completions(folder, rows)
    write(folder, 1)
    assert log.close(is_finished=True)
    table = mlflow.artifacts.load_dict(artifact("samples.json"))
    assert [data[table["columns"].index("prompt")] for data in table["data"]] == ["User: Hi\n\nAssistant: ", "plain"]


@pytest.mark.parametrize("outputs", [["evaluation_metrics"], ["evaluation_metrics", "evaluation_summary"]])
@pytest.mark.parametrize("is_last", [False, True], ids=["in the run that it ends", "repeated after a kill"])
def test_an_evaluation_that_stops_a_run_is_logged_alike_when_a_resumed_run_repeats_it(
    run_id: str, folder: Path, outputs: list[str], is_last: bool
):
    """SFT's values, which do not change, come with the run's last evaluation only."""
    pipeline = Pipeline([Node(lambda: {}, None, name, name=name) for name in outputs])
    log = RunLog(run_id, pipeline, DataCatalog({}), folder=folder)
    row = {"iteration": 7.0, "eval/reward": 0.5, "eval/reward_sft": 0.25, "eval/since_best_exported": 4.0}
    metrics_of(folder).append(EVALUATION, 7, {**row, **({"is_last": True} if is_last else {})})
    assert log.close(is_finished=True)
    assert points(run_id, "eval/reward") == [(7, 0.5)]
    assert points(run_id, "eval/reward_sft") == ([(7, 0.25)] if len(outputs) == 1 else [])
    assert "is_last" not in MlflowClient().get_run(run_id).data.metrics


@pytest.mark.parametrize("outputs", [["evaluation_metrics"], ["evaluation_metrics", "evaluation_summary"]])
def test_the_last_evaluation_of_training_gives_way_to_the_final_one(run_id: str, folder: Path, outputs: list[str]):
    pipeline = Pipeline([Node(lambda: {}, None, name, name=name) for name in outputs])
    log = RunLog(run_id, pipeline, DataCatalog({}), folder=folder)
    measured = {"eval/reward": 0.5, "eval/reward_sft": 0.25, "eval/reward_se": 0.1, "eval/since_best_p": 0.75}
    for iteration in (8, 9):
        last = {"is_last": True} if iteration == 9 else {}
        metrics_of(folder).append(EVALUATION, iteration, {"iteration": float(iteration), **measured, **last})
    assert log.close(is_finished=True)
    is_final = len(outputs) == 1
    assert points(run_id, "eval/reward") == [(8, 0.5), *([(9, 0.5)] if is_final else [])]
    assert points(run_id, "eval/reward_sft") == ([(9, 0.25)] if is_final else [])
    assert points(run_id, "eval/since_best_p") == [(8, 0.75), (9, 0.75)]
    assert points(run_id, "eval/reward_se") == []


def test_a_number_at_a_glance_has_three_digits_and_the_metric_all_of_them(run_id: str, folder: Path):
    log = RunLog(run_id, Pipeline([]), DataCatalog({}), folder=folder)
    row = {"iteration": 1.0, "objective/kl": 4.44205198, "objective/scores": -0.0567891}
    metrics_of(folder).append(ITERATION, 1, row)
    log.node_ran({"next_training_state": bare_state(99, 1)}, {})
    assert log.close(is_finished=True)
    assert points(run_id, "objective/kl") == [(1, 4.44205198)]
    assert points(run_id, "at_a_glance/kl_training") == [(1, 4.44)]
    assert points(run_id, "at_a_glance/reward_training") == [(1, -0.0568)]
    assert "iteration" not in MlflowClient().get_run(run_id).data.metrics


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_stage_that_is_one_node_reaches_mlflow_while_it_runs_and_once(run_id: str, folder: Path, has_folder: bool):
    node = Node(lambda: [], None, "sft_metrics", name="train")
    log = RunLog(run_id, Pipeline([node]), DataCatalog({}), folder=folder if has_folder else None)
    rows = [{"step": 2, "sft/loss": 3.0}, {"step": 4, "sft/loss": 2.0, "sft/eval_loss": 2.5}]
    with progress_display.watching("SFT", 4) as report:
        report(2, {"sft/loss": 3.0})
        report(4, {"sft/loss": 2.0})
        report(4, {"sft/eval_loss": 2.5})
        assert log._mirror.flush(10.0)
        assert points(run_id, "sft/loss") == [(2, 3.0), (4, 2.0)]
    log.node_ran({}, {"sft_metrics": rows})
    assert log.close(is_finished=True)
    assert points(run_id, "sft/loss") == [(2, 3.0), (4, 2.0)]
    assert points(run_id, "sft/eval_loss") == [(4, 2.5)]
    assert not progress_display.listeners
    assert (folder / "metrics.jsonl").exists() == has_folder


def test_of_a_stage_that_a_resumed_run_leaves_out_mlflow_gets_what_it_lacks(
    run_id: str, folder: Path, refusals: list[str], tmp_path: Path
):
    """MLflow refused SFT's last step; the run was killed before PPO's first checkpoint, and does not repeat SFT."""
    rows = [{"step": step, "sft/loss": step / 4} for step in (1, 2)]
    history = JSONDataset(filepath=str(tmp_path / "sft_metrics.json"))
    history.save(rows)
    pipeline = Pipeline([Node(lambda: [], None, "sft_metrics", name="train")])
    catalog = DataCatalog({"sft_metrics": history})
    killed = RunLog(run_id, pipeline, catalog, folder=folder)
    killed.node_ran({}, {"sft_metrics": rows[:1]})
    assert killed._mirror.flush(10.0)
    refusals.append("down")
    killed.node_ran({}, {"sft_metrics": rows})
    assert not killed._mirror.flush(10.0)
    refusals.clear()
    again = RunLog(run_id, pipeline, catalog, folder=folder)
    again.go_on(None, ())
    metrics_of(folder).cut(Mark())
    assert again.close(is_finished=True)
    assert points(run_id, "sft/loss") == [(1, 0.25), (2, 0.5)]
