"""MLflow's review queues: a page shows every pair whole or none, `put` can be repeated, errors are one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import copy
from typing import Any

import mlflow
import pytest
from mlflow.entities import AssessmentSource
from mlflow.genai import label_schemas, review_queues

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.datasets import mlflow_queue
from ppo_rlhf.datasets.mlflow_queue import Place, get, put
from ppo_rlhf.people.answers import Comparison
from ppo_rlhf.people.pair_page import CUT_OFF

QUESTION = "Which response is better?"
PAIRS = [Comparison(number, "p", f"a{number}", f"b{number}") for number in range(7)]


@pytest.fixture
def store(
    tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A store whose experiment 1, `own`, is the project's."""
    copy(migrated_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    mlflow.MlflowClient(uri).create_experiment("own", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("own")
    monkeypatch.setattr(mlflow_queue, "place", Place(uri, "own"))
    return uri


def traces() -> dict[int, Any]:
    """Return what MLflow knows of each pair, by number; a number may be there once only."""
    found = [trace.info for trace in mlflow.MlflowClient().search_traces(locations=["1"], max_results=500)]
    by_number = {int(info.tags["feedback.number"]): info for info in found}
    assert len(by_number) == len(found)
    return by_number


def queued(queue: str = "sft", status: str | None = None) -> set[str]:
    """Return the ids of a queue's traces."""
    [found] = [each for each in review_queues.list_review_queues(experiment_id="1") if each.name == queue]
    return {item.item_id for item in review_queues.list_review_queue_items(found.queue_id, status=status)}


def answer(number: int, value: str, person: str = "anna", kind: str = "HUMAN", rationale: str = "") -> None:
    source = AssessmentSource(kind, person)
    trace_id = traces()[number].trace_id
    mlflow.log_feedback(trace_id=trace_id, name="preferred", value=value, source=source, rationale=rationale)


def test_the_page_has_the_whole_question_and_both_whole_responses(store: str) -> None:
    long = [f"{side}{'x' * 5_000}" for side in "ab"]
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "p" * 2_000}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    address = put("sft", [Comparison(3, chat, *long, tools, cut_off_b=True)], QUESTION)
    assert address.startswith("http://127.0.0.1:5000/#/experiments/1/review-queue?selectedQueueId=rq-")
    info = traces()[3]
    assert all(text in info.request_preview for text in ("Be kind.", "p" * 2_000, '"name": "add"'))
    assert all(text in info.response_preview for text in long)
    assert info.response_preview.index("Response A\n") < info.response_preview.index(f"Response B ({CUT_OFF})\n")


def test_a_queue_asks_for_one_of_four_answers_with_the_newest_instruction(store: str) -> None:
    put("sft", PAIRS[:1], QUESTION)
    put("other", PAIRS[1:2], "Which is kinder?")
    [asked] = [each for each in label_schemas.list_label_schemas(experiment_id="1") if each.name == "preferred"]
    assert asked.input.options == ["A", "B", "tie", "both bad"]
    assert asked.instruction == "Which is kinder?"


def test_pairs_are_written_and_added_in_parts(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes, parts, flush = list[int](), list[int](), mlflow.flush_trace_async_logging
    add = review_queues.add_items_to_review_queue
    monkeypatch.setattr(mlflow_queue, "_PART", 3)
    monkeypatch.setattr(mlflow, "flush_trace_async_logging", lambda: flushes.append(1) or flush())
    monkeypatch.setattr(
        review_queues,
        "add_items_to_review_queue",
        lambda queue, item_ids: parts.append(len(item_ids)) or add(queue, item_ids=item_ids),
    )
    put("sft", PAIRS, QUESTION)
    assert (len(flushes), parts) == (3, [3, 3, 1])
    assert queued() == {info.trace_id for info in traces().values()}


@pytest.mark.parametrize("stopped_at", ["the fourth pair", "the queue", "the second part"])
def test_put_again_adds_what_is_missing_and_nothing_twice(
    store: str, monkeypatch: pytest.MonkeyPatch, stopped_at: str
) -> None:
    start, add, made = mlflow.start_span, review_queues.add_items_to_review_queue, list[int]()

    def stop_at(count: int, function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            made.append(1)
            if len(made) == count:
                mlflow.flush_trace_async_logging()
                raise KeyboardInterrupt
            return function(*given, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(mlflow_queue, "_PART", 5)
        if stopped_at == "the fourth pair":
            patched.setattr(mlflow, "start_span", stop_at(4, start))
        else:
            count = 1 if stopped_at == "the queue" else 2
            patched.setattr(review_queues, "add_items_to_review_queue", stop_at(count, add))
        with pytest.raises(KeyboardInterrupt):
            put("sft", PAIRS, QUESTION)
    before = {number: info.trace_id for number, info in traces().items()}
    assert len(before) == (3 if stopped_at == "the fourth pair" else 7)
    for _ in range(2):
        put("sft", PAIRS, QUESTION)
        after = {number: info.trace_id for number, info in traces().items()}
        assert after.keys() == {pair.number for pair in PAIRS}
        assert after.items() >= before.items()
        assert queued() == {*after.values()}


def test_a_queue_that_was_deleted_is_made_again_with_its_pairs_and_answers(store: str) -> None:
    put("sft", PAIRS, QUESTION)
    answer(2, "A")
    [found] = [each for each in review_queues.list_review_queues(experiment_id="1") if each.name == "sft"]
    review_queues.delete_review_queue(found.queue_id)
    assert [row["number"] for row in get("sft")] == [2]
    put("sft", PAIRS, QUESTION)
    assert len(queued()) == 7
    assert [row["number"] for row in get("sft")] == [2]


def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep 1,000 characters of what the page shows, as PostgreSQL does."""
    update = mlflow.update_current_trace

    def update_cut(*given: Any, response_preview: str, **options: Any) -> None:
        update(*given, **options, response_preview=response_preview[:1_000])

    monkeypatch.setattr(mlflow, "update_current_trace", update_cut)


def drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every second trace."""
    update, seen = mlflow.update_current_trace, list[int]()

    def update_some(tags: Any, **options: Any) -> None:
        seen.append(1)
        update({**tags, "feedback.queue": "dropped"} if len(seen) % 2 else tags, **options)

    monkeypatch.setattr(mlflow, "update_current_trace", update_some)


@pytest.mark.parametrize(("keep", "lost"), [(cut, 1), (drop, 1)])
def test_pairs_that_the_store_does_not_keep_whole_are_refused_and_none_is_added(
    store: str, monkeypatch: pytest.MonkeyPatch, keep: Any, lost: int
) -> None:
    put("sft", PAIRS[:2], QUESTION)
    keep(monkeypatch)
    pairs = [*PAIRS[:3], Comparison(9, "p", "a" * 600, "b" * 600)]
    with pytest.raises(
        ConfigError, match=rf"^mlflow:sft: MLflow does not keep {lost} of 4 pairs .*file of the pairs\.$"
    ):
        put("sft", pairs, QUESTION)
    assert {number for number, info in traces().items() if info.tags["feedback.queue"] == "sft"} == {0, 1}
    assert queued() == {traces()[number].trace_id for number in (0, 1)}


def test_a_pair_that_another_project_gave_the_same_number_is_not_taken_for_ours(store: str) -> None:
    put("sft", PAIRS[:1], QUESTION)
    with pytest.raises(ConfigError, match="does not keep 1 of 2 pairs"):
        put("sft", [Comparison(0, "another", "a", "b"), PAIRS[1]], QUESTION)
    assert traces().keys() == {0}


def test_answers_are_rows_of_a_file_and_only_peoples_to_our_question_that_stand(store: str) -> None:
    put("sft", PAIRS[:2], QUESTION)
    source, trace_id = AssessmentSource("HUMAN", "carl"), traces()[0].trace_id
    mlflow.log_feedback(trace_id=trace_id, name="kinder", value="A", source=source)
    given = mlflow.log_feedback(trace_id=trace_id, name="preferred", value="A", source=source)
    corrected = AssessmentSource("LLM_JUDGE", "gpt")
    mlflow.override_feedback(trace_id=trace_id, assessment_id=given.assessment_id, value="B", source=corrected)
    answer(1, "A", "anna", rationale="shorter")
    answer(0, "tie", "ben")
    answer(0, "B", "gpt", "LLM_JUDGE")
    answer(1, "both bad", "anna")
    rows = get("sft")
    assert [(row["number"], row["answer"], row["person"], row["rationale"]) for row in rows] == [
        (1, "A", "anna", "shorter"),
        (0, "tie", "ben", ""),
        (1, "both bad", "anna", ""),
    ]
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)


def test_a_queue_without_pairs_or_answers_is_refused(store: str) -> None:
    put("sft", PAIRS[:2], QUESTION)
    with pytest.raises(DataError, match=r"^mlflow:sft: nobody has answered one of the 2 pairs yet\."):
        get("sft")
    with pytest.raises(DataError, match=r"^mlflow:sfd: the experiment own has no pairs of this queue\."):
        get("sfd")
    mlflow_queue.place.experiment = "none"
    with pytest.raises(DataError, match=r"has no experiment none\.$"):
        get("sft")


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_queue, "place", Place(f"sqlite:///{tmp_path}/none.db", "own"))
    with pytest.raises(DataError, match=r"^mlflow:sft: .*sqlite:///\S+ .*`kedro run"):
        get("sft")
    assert list(tmp_path.iterdir()) == []


def test_a_question_or_a_queue_that_asks_something_else_is_refused(store: str) -> None:
    other = label_schemas.create_label_schema(
        "better", type="feedback", input=label_schemas.InputCategorical(["yes", "no"]), experiment_id="1"
    )
    review_queues.create_review_queue("sft", queue_type="custom", schema_ids=[other.schema_id], experiment_id="1")
    with pytest.raises(ConfigError, match=r"queue sft does not ask `preferred`\. Set feedback\.queue"):
        put("sft", PAIRS, QUESTION)
    [asked] = [each for each in label_schemas.list_label_schemas(experiment_id="1") if each.name == "preferred"]
    label_schemas.update_label_schema(asked.schema_id, input=label_schemas.InputCategorical(["yes", "no"]))
    with pytest.raises(ConfigError, match=r"`preferred`.*\['yes', 'no'\]"):
        put("new", PAIRS, QUESTION)
    assert traces() == {}


def test_the_store_of_the_caller_is_put_back(store: str) -> None:
    put("sft", PAIRS[:1], QUESTION)
    mlflow.set_tracking_uri("sqlite:///other.db")
    with pytest.raises(DataError):
        get("sft")
    assert mlflow.get_tracking_uri() == "sqlite:///other.db"


@pytest.fixture
def old_server() -> Iterator[str]:
    """A tracking server with experiments but without review queues, like MLflow before 3.14."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = "experiments/get-by-name" in self.path
            body = b'{"experiment": {"experiment_id": "1", "name": "own", "lifecycle_stage": "active"}}'
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(body if is_known else b"<html>Not Found</html>")

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_without_review_queues_is_refused_in_one_line(
    old_server: str, no_mlflow_left_over: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_queue, "place", Place(old_server, "own"))
    with pytest.raises(ConfigError, match=r"^mlflow:sft: .*http://\S+ .*review queues.* 3\.14"):
        put("sft", PAIRS, QUESTION)


def test_a_server_that_cannot_be_reached_is_named_without_its_password(
    no_mlflow_left_over: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_queue, "place", Place("http://me:secret@127.0.0.1:9", "own"))
    with pytest.raises(ConfigError, match=r"^mlflow:sft: .*http://\*\*\*@127\.0\.0\.1:9 "):
        get("sft")
