"""`collect_feedback`: pairs that tell no side, are never made twice, and reach a file before anybody is asked."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
from kedro.io import DatasetError

from ppo_rlhf.core.errors import ConfigError, DataError, ModelError
from ppo_rlhf.data.prompts import PromptsConfig, split_held_out
from ppo_rlhf.datasets import mlflow_queue
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.pipelines.collect_feedback import nodes
from tests.datasets.test_mlflow_queue import queued, store, traces
from tests.pipelines.feedback_project import PROMPTS, collect, pair_tables
from tests.tiny_models import draw_weights, save, tiny_model

__all__ = ["store"]


@pytest.fixture
def folder(tmp_path: Path, store: str) -> Path:
    for seed, name in enumerate(("sft", "ppo")):
        save(tmp_path / name, draw_weights(tiny_model(seed=seed), 0.5, seed=seed))
    return tmp_path


def sheet(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def sheet_of(table: pd.DataFrame) -> str:
    """Return the file of the pairs of a collection, which the place of the first pair names."""
    return f"feedback_pairs/sft_policy.{table['place'][0]}.pairs.jsonl"


def test_file_queue_and_table_have_the_same_pairs(folder: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        table = collect(folder)
    assert 4 <= len(table) <= 6
    rows = sheet(folder / sheet_of(table))
    for name in ("number", "prompt", "response_a", "response_b"):
        assert [row[name] for row in rows] == table[name].tolist()
    assert {*traces()} == {*table["number"]}
    assert queued("sft_policy") == {info.trace_id for info in traces().values()}
    lines = [line for line in caplog.messages if "http" in line or line.startswith("Then")]
    assert "here: `kedro mlflow ui`, then http://127.0.0.1:5000/#/experiments/1/review-queue?" in lines[0]
    assert lines[1].endswith('--pipelines reward_modelling,align --params "preferences_path=mlflow:sft_policy"')


def test_prompts_are_the_training_ones_and_held_out_ones_where_policies_are_compared(folder: Path) -> None:
    trained, held_out = split_held_out(PROMPTS, None, PromptsConfig())
    of_one, of_two = collect(folder), collect(folder, against="ppo_policy")
    assert {*of_one["prompt"]} <= {PROMPTS["prompt"][row] for row in trained}
    assert {*of_two["prompt"]} <= {PROMPTS["prompt"][row] for row in held_out}
    numbers = [json.loads(columns)["number"] for columns in of_one["columns"]]
    assert [PROMPTS["prompt"][number] for number in numbers] == of_one["prompt"].tolist()
    assert of_two["against"].tolist() == [str(folder / "ppo")] * len(of_two)


def test_run_again_it_adds_pairs_of_prompts_that_no_pair_has_and_none_twice(folder: Path) -> None:
    first, second = collect(folder), collect(folder)
    assert {*first["place"]} <= {*range(6)}
    assert {*second["place"]} <= {*range(first["place"].max() + 1, first["place"].max() + 7)}
    assert {*first["collected"]} < {*pair_tables(folder).load().table["collected"]}
    assert len({*first["prompt"], *second["prompt"]}) == len(first) + len(second)  # of 14 prompts
    assert {*traces()} == {*first["number"], *second["number"]}
    assert len(queued("sft_policy")) == len(first) + len(second)


def test_the_files_are_on_disk_before_the_first_trace_and_a_stopped_queue_is_filled_by_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> str:
        raise ConfigError("no server")

    with monkeypatch.context() as patched:
        patched.setattr(mlflow_queue, "put", stop)
        with pytest.raises(ConfigError):
            collect(folder)
    first = pair_tables(folder).load().table
    assert len(sheet(folder / sheet_of(first))) == len(first) >= 4
    nodes.put_pairs(pair_tables(folder).load(), FeedbackConfig())  # as `--from-nodes collect_feedback.put_pairs`
    assert {*traces()} == {*first["number"]}
    second = collect(folder)
    assert {*traces()} == {*first["number"], *second["number"]}


def test_no_table_of_sides_is_where_mlflow_shows_it(folder: Path) -> None:
    table = collect(folder)
    [run] = mlflow.search_runs(output_format="list")
    assert mlflow.MlflowClient().list_artifacts(run.info.run_id) == []
    assert {file.name for file in (folder / "feedback_pairs").iterdir()} == {
        f"{table['collected'][0]}.parquet",
        Path(sheet_of(table)).name,
    }


@pytest.mark.parametrize(
    ("settings", "then"),
    [
        ({}, 'reward_modelling,align --params "preferences_path=ANSWERS.jsonl"'),
        ({"against": "ppo_policy"}, 'human_evaluation --params "feedback.answers=ANSWERS.jsonl"'),
    ],
)
def test_exported_pairs_are_in_the_named_file_and_never_in_mlflow(
    folder: Path, caplog: Any, settings: dict[str, str], then: str
) -> None:
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        table = collect(folder, export=str(folder / "new/pairs.jsonl"), prompts="training", **settings)
    assert [row["number"] for row in sheet(folder / "new/pairs.jsonl")] == table["number"].tolist()
    assert traces() == {}
    assert caplog.messages[-1].endswith(then)
    later = collect(folder, prompts="training", **settings)
    assert {*traces()} == {*later["number"]}


def test_numbers_differ_between_all_collections_of_a_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three are collected within the same second."""
    monkeypatch.setattr(nodes.time, "time", lambda: 1.7e9)
    tables = [collect(folder, export=str(folder / f"{n}.jsonl"), queue=q) for n, q in enumerate(["q", "other", "q"])]
    numbers = [number for table in tables for number in table["number"]]
    assert len({*numbers}) == len(numbers)
    assert {*tables[0]["prompt"]}.isdisjoint(tables[2]["prompt"])


def test_of_two_runs_that_collect_the_same_pairs_the_second_writes_nothing(folder: Path) -> None:
    tables, export = pair_tables(folder), str(folder / "pairs.jsonl")
    first = collect(folder, export=export)
    (folder / sheet_of(first)).write_text("of the other run")
    before = {file.name for file in (folder / "feedback_pairs").iterdir()}
    with pytest.raises(DatasetError) as failed:
        tables.save(first.assign(collected=first["collected"] + 1, export=None))
    assert re.search(
        r"sft_policy\.\d\.pairs\.jsonl: this file exists, and is not overwritten", str(failed.value.__cause__)
    )
    assert {file.name for file in (folder / "feedback_pairs").iterdir()} == before


@pytest.mark.parametrize("against", [None, "ppo_policy"])
def test_nothing_that_a_person_or_the_trace_shows_tells_the_side(folder: Path, against: str | None) -> None:
    table = collect(folder, against=against, pairs=24, prompts="training")
    shown: dict[bool, list[str]] = {True: [], False: []}
    for row in table.to_dict("records"):
        trace = mlflow.get_trace(traces()[row["number"]].trace_id)
        whole = json.dumps([trace.info.to_dict(), [span.to_dict() for span in trace.data.spans]], default=str)
        shown[row["policy_is_a"]].append(whole)
        for secret in ("policy_is_a", "sft_policy/", "ppo_policy/", str(folder / "sft"), str(folder / "ppo")):
            assert secret not in whole
    assert len(shown[True]) > 4 < len(shown[False])
    fields = {is_a: {name for text in texts for name in _names(json.loads(text))} for is_a, texts in shown.items()}
    assert fields[True] == fields[False]


def _names(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(name for each in value.values() for name in _names(each))]
    return [name for each in value for name in _names(each)] if isinstance(value, list) else []


def test_a_collection_of_equal_responses_is_refused_with_what_to_change(folder: Path) -> None:
    with pytest.raises(DataError, match=r"^6 of 6 pairs have equal responses .*feedback\.temperature"):
        collect(folder, temperature=1e-4)
    assert pair_tables(folder).load().table.empty


def test_a_policy_that_has_gone_is_named_before_anything_is_made(folder: Path) -> None:
    with pytest.raises(ModelError, match="gone"):
        collect(folder, against=str(folder / "gone"))
    assert pair_tables(folder).load().table.empty


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
