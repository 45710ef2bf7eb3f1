"""`collect_feedback`: pairs that tell no side, are never made twice, and are all in the queue or none."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from shutil import copy
from typing import Any

import mlflow
import pandas as pd
import pytest
from kedro.io import DatasetError

from ppo_rlhf.core.errors import ConfigError, DataError, ModelError
from ppo_rlhf.data.prompts import PromptsConfig, split_held_out
from ppo_rlhf.datasets import RecordsDataset
from ppo_rlhf.datasets.pair_tables import read_pair_tables
from ppo_rlhf.datasets.review_queues import ReviewQueues
from ppo_rlhf.pipelines.collect_feedback import nodes
from ppo_rlhf.supervised.comparisons import PLACES, FeedbackConfig, pair_key
from tests.pipelines.feedback_project import POINTS, PROMPTS, collect, pair_tables, use_store
from tests.tiny_models import draw_weights, save, tiny_model


@pytest.fixture
def folder(tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None) -> Path:
    copy(migrated_database, tmp_path / "mlflow.db")
    for seed, name in enumerate(("sft", "ppo")):
        save(tmp_path / name, draw_weights(tiny_model(seed=seed), 0.5, seed=seed))
    return tmp_path


@pytest.fixture
def queues(folder: Path) -> ReviewQueues:
    return use_store(folder)


def keys(queues: ReviewQueues, queue: str = "sft_policy") -> list[str]:
    return [pair_key(each.prompt, each.response_a, each.response_b) for each in queues.read(queue)]


def test_the_queue_has_the_pairs_of_the_table_with_their_texts(folder: Path, queues: ReviewQueues) -> None:
    table, done = collect(folder)
    read = queues.read("sft_policy")
    assert 4 <= len(table) <= 6
    for name in ("number", "prompt", "response_a", "response_b"):
        assert [getattr(each, name) for each in read] == table[name].tolist()
    assert keys(queues) == table["pair"].tolist()
    assert done["added"] == done["pairs"] == len(table)
    assert done["answered"] == 0
    assert done["address"].startswith("http://127.0.0.1:5000/#/experiments/1/review-queue?selectedQueueId=rq-")
    assert {each.run_id for each in read} == {mlflow.search_runs(output_format="list")[0].info.run_id}


def test_prompts_are_the_training_ones_and_held_out_ones_where_policies_are_compared(
    folder: Path, queues: ReviewQueues
) -> None:
    trained, held_out = split_held_out(PROMPTS, None, PromptsConfig())
    of_one, of_two = collect(folder)[0], collect(folder, against="ppo_policy")[0]
    assert {*of_one["prompt"]} <= {PROMPTS["prompt"][row] for row in trained}
    assert {*of_two["prompt"]} <= {PROMPTS["prompt"][row] for row in held_out}
    numbers = [json.loads(columns)["number"] for columns in of_one["columns"]]
    assert [PROMPTS["prompt"][number] for number in numbers] == of_one["prompt"].tolist()
    assert of_two["against"].tolist() == [str(folder / "ppo")] * len(of_two)


def test_run_again_it_adds_more_pairs_and_none_twice(folder: Path, queues: ReviewQueues) -> None:
    first, second = collect(folder)[0], collect(folder)[0]
    assert len(second) >= 4
    assert keys(queues) == [*first["pair"], *second["pair"]]
    assert len({*keys(queues)}) == len(first) + len(second)
    assert second["number"].min() > first["number"].max()
    assert (first["number"] % PLACES).max() < (second["number"] % PLACES).min()


def test_a_later_collection_goes_on_with_the_prompts_that_no_pair_has(folder: Path, queues: ReviewQueues) -> None:
    first, second = collect(folder)[0], collect(folder)[0]
    assert len({*first["prompt"], *second["prompt"]}) == len(first) + len(second)  # of 14 prompts


def test_no_table_of_sides_and_no_secret_is_where_the_api_shows_it(folder: Path, queues: ReviewQueues) -> None:
    collect(folder)
    [run] = mlflow.search_runs(output_format="list")
    assert mlflow.MlflowClient().list_artifacts(run.info.run_id) == []
    assert [file.name for file in (folder / "feedback_pairs").iterdir()] == [f"{run.info.run_id}.parquet"]


def test_the_table_of_sides_is_on_disk_before_the_first_trace(
    folder: Path, queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[int] = []
    write = ReviewQueues.write
    monkeypatch.setattr(
        ReviewQueues, "write", lambda *given: on_disk.append(len(pair_tables(folder).load())) or write(*given)
    )
    table, _ = collect(folder)
    assert on_disk == [len(table)]


def sheet(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_pairs_go_out_as_a_file_and_answers_come_back_by_one(
    folder: Path, queues: ReviewQueues, caplog: Any, no_mlflow_left_over: None
) -> None:
    file, answers = folder / "pairs.jsonl", folder / "answers.jsonl"
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        table, done = collect(folder, export=str(file), reward_components=[{"type": "function", "function": "a:b"}])
    rows = sheet(file)
    assert not queues.exists("sft_policy")
    assert mlflow.MlflowClient().search_traces(locations=["1"]) == []
    assert done["address"] is None
    assert [{*row} for row in rows] == [
        {"number", "prompt", "tools", "response_a", "response_b", "cut_off_a", "cut_off_b"}
    ] * len(table)
    for name in ("number", "prompt", "response_a", "response_b"):
        assert [row[name] for row in rows] == table[name].tolist()
    [then] = [line for line in caplog.messages if line.startswith("Then: ")]
    assert then.endswith(
        'reward_modelling,align --params "preferences_path=ANSWERS.jsonl,reward_components=[{type: model}]"'
    )
    given = [
        {"number": rows[0]["number"], "answer": "A", "person": "anna", "time": "2026-01-02", "rationale": "short"},
        {"number": rows[0]["number"], "answer": "B", "person": "anna", "time": "2026-01-01", "rationale": ""},
        {"number": rows[1]["number"], "answer": "B", "person": "ben", "time": "2026-01-01", "rationale": ""},
        {"number": rows[2]["number"], "answer": "perhaps", "person": "ben", "time": "2026-01-01", "rationale": ""},
        {"number": 5, "answer": "A", "person": "ben", "time": "2026-01-01", "rationale": ""},
    ]
    answers.write_text("".join(f"{json.dumps(each)}\n" for each in given))
    read: Any = RecordsDataset(str(answers), pairs={"path": str(folder / "feedback_pairs")}).load()
    assert [(row["number"], row["chosen"], row["rejected"], row["people"]) for row in read] == [
        (rows[0]["number"], rows[0]["response_a"], rows[0]["response_b"], ["anna"]),
        (rows[1]["number"], rows[1]["response_b"], rows[1]["response_a"], ["ben"]),
    ]
    assert "1 of 4 numbers are of no pair" in caplog.text
    assert "1 answers are not one of A, B, tie, both bad" in caplog.text
    answers.write_text(json.dumps({**given[-1], "number": "p1"}))
    with pytest.raises(DatasetError) as failed:
        RecordsDataset(str(answers), pairs={"path": str(folder / "feedback_pairs")}).load()
    assert re.search(r"answers\.jsonl: row 0: number='p1' is not the number", str(failed.value.__cause__))


def test_a_later_export_has_other_pairs_with_numbers_that_no_pair_had(
    folder: Path, queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three are collected within the same second."""
    monkeypatch.setattr(nodes.time, "time", lambda: 1.7e9)
    first = collect(folder, export=str(folder / "one.jsonl"))[0]
    second = collect(folder, export=str(folder / "two.jsonl"), queue="other")[0]
    third = collect(folder, export=str(folder / "three.jsonl"))[0]
    numbers = [*first["number"], *second["number"], *third["number"]]
    assert len({*numbers}) == len(numbers)
    assert {*first["pair"]}.isdisjoint(third["pair"])
    assert sheet(folder / "three.jsonl")[0]["number"] == third["number"][0]


def test_pairs_that_the_store_would_cut_go_out_as_a_file_and_none_into_the_queue(
    folder: Path, queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(ReviewQueues, "shows_whole", lambda *_: False)
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        table, _ = collect(folder)
    file = folder / f"feedback_pairs/sft_policy.{table['number'][0]}.jsonl"
    assert [row["number"] for row in sheet(file)] == table["number"].tolist()
    assert f"{len(table)} pairs are in {file}" in caplog.text
    assert not queues.exists("sft_policy")
    assert mlflow.MlflowClient().search_traces(locations=["1"]) == []


def test_a_second_run_that_collects_for_a_queue_is_refused(folder: Path, queues: ReviewQueues) -> None:
    empty, feedback = pair_tables(folder).load(), FeedbackConfig()
    first = nodes.find_queued_pairs(empty, feedback) if mlflow.start_run() else {}
    with pytest.raises(ConfigError, match=r"^feedback\.queue=sft_policy: another run is collecting"):
        nodes.find_queued_pairs(empty, feedback)
    nodes.find_queued_pairs(empty, FeedbackConfig(queue="other"))
    first.clear()
    nodes.find_queued_pairs(empty, feedback)
    mlflow.end_run()


def test_a_damaged_table_of_pairs_is_named_in_one_line(folder: Path, queues: ReviewQueues) -> None:
    table, _ = collect(folder)
    [file] = (folder / "feedback_pairs").iterdir()
    table.drop(columns="policy_is_a").to_parquet(file)
    with pytest.raises(DataError, match=rf"^{file}: .*damaged: no column policy_is_a\."):
        read_pair_tables(folder / "feedback_pairs")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"^{file}: .*damaged: .*Restore the file\.$"):
        read_pair_tables(folder / "feedback_pairs")


def test_a_pair_that_the_queue_has_is_not_sampled_again(folder: Path, queues: ReviewQueues) -> None:
    table, _ = collect(folder)
    known = {"next": 0, "known": table["pair"].tolist()[:2], "waiting": []}
    handles = [nodes.policy_named(str(folder / name), {"sft_policy": like}) for name, like in _handles(folder)]
    from tests.pipelines.feedback_project import PPO

    again = nodes.sample_pairs(known, *handles, PROMPTS, None, PPO, PromptsConfig(), FeedbackConfig(pairs=6))
    assert again["pair"].tolist() == table["pair"].tolist()[2:]


def _handles(folder: Path) -> list[tuple[str, Any]]:
    from ppo_rlhf.models.loading import PretrainedHandle

    return [(name, PretrainedHandle(str(folder / name))) for name in ("sft", "ppo")]


@pytest.mark.parametrize("against", [None, "ppo_policy"])
def test_nothing_that_a_person_or_the_trace_shows_tells_the_side(
    folder: Path, queues: ReviewQueues, against: str | None
) -> None:
    table = collect(folder, against=against, pairs=24, prompts="training")[0]
    shown: dict[bool, list[str]] = {True: [], False: []}
    for each, is_a in zip(queues.read(FeedbackConfig(against=against).queue_name), table["policy_is_a"], strict=True):
        trace = mlflow.get_trace(each.trace_id)
        whole = json.dumps([trace.info.to_dict(), [span.to_dict() for span in trace.data.spans]], default=str)
        for text in (each.prompt, each.response_a, each.response_b):
            whole = whole.replace(json.dumps(json.dumps(text))[1:-1], "").replace(json.dumps(text)[1:-1], "")
        shown[is_a].append(whole)
        for secret in ("policy_is_a", "sft_policy/", "ppo_policy/", str(folder / "sft"), str(folder / "ppo")):
            assert secret not in whole
    assert len(shown[True]) > 4 < len(shown[False])
    fields = {is_a: {name for text in texts for name in _names(json.loads(text))} for is_a, texts in shown.items()}
    assert fields[True] == fields[False]


def _names(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(name for each in value.values() for name in _names(each))]
    return [name for each in value for name in _names(each)] if isinstance(value, list) else []


def test_equal_responses_are_left_out_and_counted(folder: Path, queues: ReviewQueues, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        table, done = collect(folder, temperature=1e-4)
    assert len(table) == done["added"] == 0
    assert any(line.startswith("6 of 6 pairs ") for line in caplog.messages)


def stop_at(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = mlflow.start_span, []

    def stop(*_: Any, **__: Any) -> Any:
        mlflow.flush_trace_async_logging()
        raise KeyboardInterrupt

    def start_or_stop(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        return stop() if len(made) == 4 else start(*arguments, **options)

    if point == POINTS[1]:
        monkeypatch.setattr(mlflow, "start_span", start_or_stop)
    else:
        monkeypatch.setattr(ReviewQueues, "write" if point == POINTS[0] else "attach", stop)


def check_second_run(folder: Path, queues: ReviewQueues, left: int) -> None:
    """Run again after a run was stopped: its traces count, none is there twice, and none is half."""
    assert not queues.has_pairs("sft_policy")
    assert len(queues.waiting("sft_policy")) == left
    _, done = collect(folder)
    assert done["pairs"] == done["added"] == len({*keys(queues)})
    assert 4 <= done["pairs"] <= 6
    assert queues.waiting("sft_policy") == []
    assert len(mlflow.MlflowClient().search_traces(locations=["1"])) == done["pairs"]


@pytest.mark.parametrize(("point", "left"), zip(POINTS, (0, 3, 6), strict=True))
def test_a_run_that_was_stopped_leaves_nothing_that_a_second_one_doubles(
    folder: Path, queues: ReviewQueues, monkeypatch: pytest.MonkeyPatch, point: str, left: int
) -> None:
    with monkeypatch.context() as patched:
        stop_at(point, patched)
        with pytest.raises(KeyboardInterrupt):
            collect(folder)
    check_second_run(folder, queues, left)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "left"), zip(POINTS, (0, 3, 6), strict=True))
def test_a_run_that_was_killed_leaves_nothing_that_a_second_one_doubles(
    folder: Path, queues: ReviewQueues, point: str, left: int
) -> None:
    command = [sys.executable, "-m", "tests.pipelines.feedback_project", str(folder), point]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    check_second_run(folder, queues, left)


def test_a_queue_that_was_deleted_is_made_again_with_its_pairs_and_answers(folder: Path, queues: ReviewQueues) -> None:
    from mlflow.genai import review_queues

    table, _ = collect(folder)
    queues.answer("sft_policy", queues.read("sft_policy")[0].trace_id, "A", "anna")
    found = review_queues.get_review_queue(name="sft_policy", experiment_id="1")
    review_queues.delete_review_queue(found.queue_id)
    collect(folder, pairs=len(table))
    assert keys(queues) == table["pair"].tolist()
    assert [each.person for each in queues.read("sft_policy")[0].answers] == ["anna"]


def test_a_policy_that_has_gone_is_named_before_anything_is_made(folder: Path, queues: ReviewQueues) -> None:
    with pytest.raises(ModelError, match="gone"):
        collect(folder, against=str(folder / "gone"))
    assert not queues.exists("sft_policy")


def test_an_untracked_run_is_refused(queues: ReviewQueues) -> None:
    with pytest.raises(ConfigError, match=r"collect_feedback.*tracking\.disable_tracking"):
        nodes.find_queued_pairs(pd.DataFrame(), FeedbackConfig())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"queue": "default"}, r"^feedback\.queue='default': a queue's name"),
        ({"queue": "it's"}, r"^feedback\.queue="),
        ({"against": "sft_policy"}, r"^feedback\.against=sft_policy .*feedback\.policy"),
        ({"temperature": 0.0}, r"^feedback\.temperature=0\.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FeedbackConfig(**settings)


def test_a_queue_is_named_after_its_policies() -> None:
    assert FeedbackConfig().queue_name == "sft_policy"
    assert FeedbackConfig(against="org/my model@main").queue_name == "sft_policy against my-model-main"
    assert FeedbackConfig(queue="mine").queue_name == "mine"
