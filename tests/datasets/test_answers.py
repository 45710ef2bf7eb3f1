"""Preferences from a review queue: the majority's response is chosen, unused pairs are counted, rows are stored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlflow
import pytest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.tables import frame_of
from ppo_rlhf.datasets import MlflowAnswersDataset, RecordsDataset, review_queues
from ppo_rlhf.datasets.review_queues import ReviewQueues
from ppo_rlhf.models.quiet import said
from ppo_rlhf.pipelines.reward_modelling.nodes import check_preferences, keep_answers
from ppo_rlhf.supervised.people_answers import Comparison, preferences_of
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from tests.datasets.test_review_queues import HARD, answer, filled, queues

__all__ = ["queues"]


@pytest.fixture
def here(queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch) -> ReviewQueues:
    monkeypatch.setattr(review_queues, "place", review_queues.Place(queues.uri, queues.experiment))
    said.clear()
    return queues


def test_the_preferred_side_is_chosen_and_the_rest_is_counted(here: ReviewQueues, caplog: Any) -> None:
    ids = filled(
        here, [Comparison(n, f"prompt {n}", f"a{n}", f"b{n}") for n in range(7)] + [Comparison(7, "p", "a", " ")]
    )
    for trace_id, values in zip(ids, ["A", "B", "tie", "both bad", "AB", "BAB", "", "A"], strict=True):
        for number, value in enumerate([values] if len(values) > 3 or values == "tie" else values):
            answer(here, trace_id, value, f"person {number}")
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        dataset = RecordsDataset("mlflow:sft")
        table: Any = dataset.load()
        dataset.load()
    rows = [(row["prompt"], row["chosen"], row["rejected"], row["trace_id"]) for row in table]
    assert rows == [
        ("prompt 0", "a0", "b0", ids[0]),
        ("prompt 1", "b1", "a1", ids[1]),
        ("prompt 5", "b5", "a5", ids[5]),
    ]
    assert table["people"][2] == ["person 0", "person 1", "person 2"]
    [line] = [line for line in caplog.messages if "pairs are used" in line]
    assert line == (
        "mlflow:sft: 3 of 8 pairs are used; 1 ties, 1 both bad, 1 without a majority, 1 unanswered, "
        "1 with a blank response. 3 people, "
        f"whose agreement (Krippendorff's alpha) is {table['agreement'][0]:.2f}."
    )


def test_texts_of_any_kind_become_preferences_exactly(here: ReviewQueues) -> None:
    texts = [text for text in HARD.values() if text]
    for trace_id in filled(here, [Comparison(n, text, text, f"{text}!") for n, text in enumerate(texts)]):
        answer(here, trace_id, "B")
    table: Any = RecordsDataset("mlflow:sft").load()
    checked = check_preferences(table, RewardModellingConfig())
    assert checked["prompt"].tolist() == checked["rejected"].tolist() == texts
    assert checked["chosen"].tolist() == [f"{text}!" for text in texts]


def test_columns_that_are_kept_are_not_told_to_be_unused(here: ReviewQueues, caplog: Any) -> None:
    [trace_id] = filled(here, [Comparison(0, "p", "a", "b")])
    answer(here, trace_id, "A")
    table = frame_of(RecordsDataset("mlflow:sft").load())
    check_preferences(table, RewardModellingConfig())
    assert "not used" not in caplog.text
    check_preferences(table.assign(score=1.0), RewardModellingConfig())
    assert "preferences: not used: `score`." in caplog.text


def test_a_chat_comes_back_as_a_chat_with_its_answer(here: ReviewQueues) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    [trace_id] = filled(here, [Comparison(0, chat, "good", "bad")])
    answer(here, trace_id, "A")
    table: Any = RecordsDataset("mlflow:sft").load()
    [row] = check_preferences(table, RewardModellingConfig()).to_dict("records")
    assert row["prompt"] == chat
    assert row["chosen"] == [{"role": "assistant", "content": "good"}]
    assert row["rejected"] == [{"role": "assistant", "content": "bad"}]


def test_the_fingerprint_is_of_the_answers_as_they_were_read(here: ReviewQueues) -> None:
    [first, second] = filled(here, [Comparison(n, "p", f"a{n}", f"b{n}") for n in range(2)])
    answer(here, first, "A")
    dataset = RecordsDataset("mlflow:sft")
    before = dataset.fingerprint()
    answer(here, second, "B")
    assert dataset.fingerprint() == before  # the run has read the answers
    assert len(dataset.load() or []) == 1
    assert RecordsDataset("mlflow:sft").fingerprint() != before


def test_a_queue_that_prefers_nothing_or_mixes_kinds_is_refused(here: ReviewQueues) -> None:
    ids = filled(here, [Comparison(0, "p", "a", "b"), Comparison(1, [{"role": "user", "content": "p"}], "a", "b")])
    answer(here, ids[0], "tie")
    with pytest.raises(DataError, match=r"^mlflow:sft: .* 2 pairs\."):
        preferences_of(here.read("sft"), "mlflow:sft")
    for trace_id in ids:
        answer(here, trace_id, "A")
    with pytest.raises(DataError, match=r"^mlflow:sft: .*texts .*chats\."):
        preferences_of(here.read("sft"), "mlflow:sft")


def test_the_rows_that_were_used_are_kept_and_train_again_without_the_traces(
    here: ReviewQueues, tmp_path: Path
) -> None:
    ids = filled(here, [Comparison(n, "p", f"a{n}", f"b{n}") for n in range(3)])
    for trace_id in ids:
        answer(here, trace_id, "A", "anna")
    table: Any = RecordsDataset("mlflow:sft").load()
    settings = RewardModellingConfig()
    checked, file = check_preferences(table, settings), tmp_path / "kept" / "answered_preferences.jsonl"
    mlflow.set_tracking_uri(here.uri)
    mlflow.set_experiment("own")
    with mlflow.start_run() as run:
        MlflowAnswersDataset(str(file)).save(keep_answers(table, checked))
    assert [item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id, "preferences")] == [
        "preferences/answered_preferences.jsonl"
    ]
    mlflow.MlflowClient().delete_traces(experiment_id="1", trace_ids=ids)
    kept: Any = RecordsDataset(str(file)).load()
    assert check_preferences(kept, settings).equals(checked)
    assert kept["people"] == [["anna"]] * 3
    assert {"answered_at", "rationales", "trace_id"} <= {*kept.column_names}
    assert frame_of(keep_answers_table(kept, settings)).equals(frame_of(kept))


def keep_answers_table(kept: Any, settings: RewardModellingConfig) -> Any:
    from ppo_rlhf.data.sources import table_of

    return table_of(keep_answers(kept, check_preferences(kept, settings)).to_dict("list"))


def test_of_other_preferences_nothing_is_kept_and_an_earlier_file_stays(tmp_path: Path) -> None:
    from ppo_rlhf.data.sources import table_of

    table, file = table_of({"chosen": ["a"], "rejected": ["b"]}), tmp_path / "kept.jsonl"
    file.write_text("earlier")
    for given in (table, None):
        rows = keep_answers(given, check_preferences(given, RewardModellingConfig()))
        MlflowAnswersDataset(str(file)).save(rows)
    assert file.read_text() == "earlier"
