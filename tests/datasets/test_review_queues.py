"""MLflow's review queues: pairs are read back exactly, traces do not reveal the sides, errors are one line."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import copy
from typing import Any

import mlflow
import pytest
from mlflow.entities import AssessmentSource

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.datasets import review_queues as module
from ppo_rlhf.datasets.pair_page import CUT_OFF
from ppo_rlhf.datasets.review_queues import ReviewQueues
from ppo_rlhf.supervised.people_answers import Comparison

HARD = {
    "markdown": "# Response B\n\n- a\n- b\n\n**bold** `code` ---\n\n---\n> quoted",
    "html": "<script>alert(1)</script><div>&lt; &amp; <b>open",
    "fence": "```python\nprint(1)\n\nnever closed\n~~~\n````",
    "right to left": "مرحبا بالعالم \u202e reversed \u200f שלום",
    "escape codes": "\x1b[31mred\x1b[0m \t tab \r carriage \r\n windows\u2028separator",
    "long": "word \u00e9\U0001f600" * 500,
    "empty": "",
    "spaces": "  leading and trailing  \n\n",
}


@pytest.fixture
def queues(tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None) -> ReviewQueues:
    copy(migrated_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.MlflowClient(uri).create_experiment("own", artifact_location=str(tmp_path / "artifacts"))
    return ReviewQueues(uri, "own")


def filled(queues: ReviewQueues, pairs: list[Comparison], queue: str = "sft") -> list[str]:
    queues.prepare(queue, "Which response is better?")
    ids = queues.write(queue, pairs)
    queues.attach(queue, ids)
    return ids


def answer(queues: ReviewQueues, trace_id: str, value: str, person: str = "anna", kind: str = "HUMAN") -> None:
    mlflow.set_tracking_uri(queues.uri)
    mlflow.log_feedback(trace_id=trace_id, name="preferred", value=value, source=AssessmentSource(kind, person))


def test_texts_of_any_kind_come_back_exactly_in_their_order(queues: ReviewQueues) -> None:
    texts = [*HARD.values()]
    pairs = [Comparison(n, text, text, texts[n - 1]) for n, text in enumerate(texts)]
    filled(queues, pairs)
    read = queues.read("sft")
    assert [(c.number, c.prompt, c.response_a, c.response_b) for c in read] == [
        (n, text, text, texts[n - 1]) for n, text in enumerate(texts)
    ]
    assert len(HARD["long"]) > 3000


def test_a_chat_comes_back_with_its_messages_and_tools(queues: ReviewQueues) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi\nthere"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    filled(queues, [Comparison(0, chat, "a", "b", tools)])
    [read] = queues.read("sft")
    assert (read.prompt, read.tools) == (chat, tools)


def previews(queues: ReviewQueues, trace_id: str) -> tuple[str, str]:
    mlflow.set_tracking_uri(queues.uri)
    info: Any = mlflow.get_trace(trace_id).info
    return info.request_preview, info.response_preview


def test_the_page_has_the_whole_question_and_both_whole_responses(queues: ReviewQueues) -> None:
    long = [f"{side}{'x' * 5_000}" for side in "ab"]
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "p" * 2_000}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    pair = Comparison(0, chat, *long, tools, cut_off_b=True)
    assert queues.shows_whole([pair])
    [trace_id] = filled(queues, [pair])
    request, response = previews(queues, trace_id)
    assert all(text in request for text in ("Be kind.", "p" * 2_000, '"name": "add"'))
    assert all(text in response for text in long)
    assert response.index("### Response A\n") < response.index(f"### Response B ({CUT_OFF})\n")
    assert len(mlflow.MlflowClient().search_traces(locations=["1"])) == 1  # the trace that tried the store is gone


def test_a_store_that_cuts_what_its_page_shows_is_known_before_anything_is_written(
    queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = mlflow.update_current_trace

    def cut(*given: Any, response_preview: str, **options: Any) -> None:
        update(*given, **options, response_preview=response_preview[:1_000])

    monkeypatch.setattr(mlflow, "update_current_trace", cut)
    assert queues.shows_whole([Comparison(0, "p", "a", "b")])
    assert not queues.shows_whole([Comparison(0, "p", "a", "b"), Comparison(1, "p", "a" * 600, "b" * 600)])
    assert mlflow.MlflowClient(queues.uri).search_traces(locations=["1"]) == []


def test_traces_are_written_and_added_to_the_queue_in_parts(
    queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.genai import review_queues

    flushes, parts, flush = list[int](), list[int](), mlflow.flush_trace_async_logging
    add = review_queues.add_items_to_review_queue
    monkeypatch.setattr(module, "_PART", 3)
    monkeypatch.setattr(mlflow, "flush_trace_async_logging", lambda: flushes.append(1) or flush())
    monkeypatch.setattr(
        review_queues,
        "add_items_to_review_queue",
        lambda queue, item_ids: parts.append(len(item_ids)) or add(queue, item_ids=item_ids),
    )
    ids = filled(queues, [Comparison(n, "p", "a", "b") for n in range(7)])
    assert (len(flushes), parts) == (3, [3, 3, 1])
    assert [each.trace_id for each in queues.read("sft")] == ids


def test_a_queue_whose_question_was_renamed_is_refused_with_what_it_asks(queues: ReviewQueues) -> None:
    from mlflow.genai import label_schemas

    [trace_id] = filled(queues, [Comparison(0, "p", "a", "b")])
    answer(queues, trace_id, "A")
    [schema] = [each for each in label_schemas.list_label_schemas(experiment_id="1") if each.name == "preferred"]
    label_schemas.update_label_schema(str(schema.schema_id), name="better")
    with pytest.raises(DataError, match=r"^mlflow:sft: this queue asks better, not `preferred`\. "):
        queues.read("sft")


def test_the_newest_answer_of_each_person_counts_and_only_peoples(queues: ReviewQueues) -> None:
    [trace_id] = filled(queues, [Comparison(0, "p", "a", "b")])
    for value, person, kind in (("A", "anna", "HUMAN"), ("tie", "ben", "HUMAN"), ("B", "gpt", "LLM_JUDGE")):
        answer(queues, trace_id, value, person, kind)
    answer(queues, trace_id, "both bad")
    [read] = queues.read("sft")
    assert {each.person: each.value for each in read.answers} == {"anna": "both bad", "ben": "tie"}


def test_an_answer_of_a_script_is_read_as_a_persons_and_completes_the_pair(queues: ReviewQueues) -> None:
    from mlflow.genai import review_queues

    [first, _] = filled(queues, [Comparison(0, "p", "a", "b"), Comparison(1, "p", "c", "d")])
    queues.answer("sft", first, "B", "a script", "longer")
    mlflow.set_tracking_uri(queues.uri)
    queue = review_queues.get_review_queue(name="sft", experiment_id="1")
    done = [item.item_id for item in review_queues.list_review_queue_items(queue.queue_id, status="complete")]
    assert done == [first]
    [given] = queues.read("sft")[0].answers
    assert (given.value, given.person, given.rationale) == ("B", "a script", "longer")


def test_an_answer_that_is_none_of_the_four_is_left_out_and_named(queues: ReviewQueues, caplog: Any) -> None:
    [trace_id] = filled(queues, [Comparison(0, "p", "a", "b")])
    answer(queues, trace_id, "C")
    [read] = queues.read("sft")
    assert read.answers == ()
    assert re.search(r"mlflow:sft: 1 answers .*A, B, tie, both bad .*: C\.", caplog.text)


def test_a_deleted_trace_takes_no_other_with_it(queues: ReviewQueues) -> None:
    first, _ = filled(queues, [Comparison(0, "p", "a", "b"), Comparison(1, "p", "c", "d")])
    mlflow.set_tracking_uri(queues.uri)
    mlflow.MlflowClient().delete_traces(experiment_id="1", trace_ids=[first])
    assert [each.response_a for each in queues.read("sft")] == ["c"]


def test_a_pair_whose_tag_a_person_changed_is_still_read(queues: ReviewQueues) -> None:
    [trace_id] = filled(queues, [Comparison(0, "p", "a", "b")])
    mlflow.set_tracking_uri(queues.uri)
    mlflow.MlflowClient().set_trace_tag(trace_id, "feedback.queue", "other")
    assert [each.response_a for each in queues.read("sft")] == ["a"]


def test_pairs_that_no_queue_has_wait_and_are_attached_once(queues: ReviewQueues) -> None:
    queues.prepare("sft", "?")
    ids = queues.write("sft", [Comparison(0, "p", "a", "b"), Comparison(1, "p", "c", "d")])
    assert [each.trace_id for each in queues.waiting("sft")] == ids
    queues.attach("sft", ids)
    queues.attach("sft", ids)
    assert queues.waiting("sft") == []
    assert [each.trace_id for each in queues.read("sft")] == ids


def test_a_queue_that_is_not_there_is_refused_with_those_that_are(queues: ReviewQueues) -> None:
    filled(queues, [Comparison(0, "p", "a", "b")])
    with pytest.raises(DataError, match=r"^mlflow:sfd: .* experiment own.* sft\.$"):
        queues.read("sfd")
    mlflow.MlflowClient(queues.uri).create_experiment("second")
    with pytest.raises(DataError, match=r"^mlflow:sft: .* second\. .*experiment own .*tracking\.experiment\.name"):
        ReviewQueues(queues.uri, "second").read("sft")
    with pytest.raises(DataError, match=r"experiment none\.$"):
        ReviewQueues(queues.uri, "none").read("sft")


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^mlflow:sft: .*sqlite:///\S+ .*`kedro run"):
        ReviewQueues(f"sqlite:///{tmp_path}/none.db", "own").read("sft")
    assert list(tmp_path.iterdir()) == []


def test_a_question_of_this_name_with_other_answers_is_refused(queues: ReviewQueues) -> None:
    from mlflow.genai import label_schemas

    mlflow.set_tracking_uri(queues.uri)
    label_schemas.create_label_schema(
        "preferred", type="feedback", input=label_schemas.InputCategorical(["yes", "no"]), experiment_id="1"
    )
    with pytest.raises(ConfigError, match=r"`preferred`.*\['yes', 'no'\]"):
        queues.prepare("sft", "?")


def test_the_store_of_the_caller_is_put_back(queues: ReviewQueues) -> None:
    mlflow.set_tracking_uri("sqlite:///other.db")
    queues.exists("sft")
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


def test_a_server_without_review_queues_is_refused_in_one_line(old_server: str, no_mlflow_left_over: None) -> None:
    with pytest.raises(ConfigError, match=r"http://\S+ .*review queues.* 3\.14"):
        ReviewQueues(old_server, "own").read("sft")


def test_a_server_that_cannot_be_reached_is_named_without_its_password(no_mlflow_left_over: None) -> None:
    with pytest.raises(ConfigError, match=r"^mlflow:sft: .*http://\*\*\*@127\.0\.0\.1:9 "):
        ReviewQueues("http://me:secret@127.0.0.1:9", "own").read("sft")
