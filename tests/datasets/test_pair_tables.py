"""Pairs and answers as files: the sides stay in a table of their own, and the majority's response is chosen."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kedro.io import DatasetError

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.datasets import PairTablesDataset, RecordsDataset, mlflow_queue, pair_tables
from ppo_rlhf.datasets.pair_tables import comparison_of
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.pipelines.reward_modelling.nodes import check_preferences
from ppo_rlhf.preflight.run_checks import check_feedback
from ppo_rlhf.runtime.log_lines import said
from ppo_rlhf.runtime.whole_files import written_whole
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from tests.datasets.test_mlflow_queue import answer, store
from tests.people.test_pair_page import HARD

__all__ = ["store"]

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi\nthere"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def collected(folder: Path, pairs: list[tuple[Any, str, str]], **columns: Any) -> PairTablesDataset:
    """Save pairs (prompt, response A, response B), numbered from 0, as a collection does."""
    rows = [
        {
            "number": number,
            "place": number,
            "prompt": prompt if isinstance(prompt, str) else "rendered",
            "prompt_chat": None if isinstance(prompt, str) else as_json(prompt),
            "tools": None if isinstance(prompt, str) else as_json(TOOLS),
            "response_a": a,
            "response_b": b,
            "cut_off_a": False,
            "cut_off_b": True,
            "policy_is_a": bool(number % 2),
            "random_sample": True,
        }
        for number, (prompt, a, b) in enumerate(pairs)
    ]
    others = {
        "queue": "sft",
        "collected": 0,
        "export": str(folder / "pairs.jsonl"),
        "policy": "models/one",
        "against": "models/two",
    }
    tables = PairTablesDataset(str(folder / "feedback_pairs"))
    tables.save(pd.DataFrame(rows).assign(**{**others, **columns}))
    return tables


def given_answers(folder: Path, *answers: tuple[int, str, str, str]) -> Path:
    """Write an answers' file of rows (number, answer, person, time)."""
    rows = [dict(zip(("number", "answer", "person", "time"), row, strict=True)) for row in answers]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "answers.jsonl"


def preferences(folder: Path, source: Path | str) -> RecordsDataset:
    said.clear()
    return RecordsDataset(str(source), pairs={"path": str(folder / "feedback_pairs")})


def test_the_file_of_the_pairs_has_what_people_see_and_neither_side_nor_policy(tmp_path: Path) -> None:
    collected(tmp_path, [("p", "a", "b"), (CHAT, "c", "d")])
    text = (tmp_path / "pairs.jsonl").read_text()
    seen = {"cut_off_a": False, "cut_off_b": True, "random_sample": True}
    assert [json.loads(line) for line in text.splitlines()] == [
        {"number": 0, "prompt": "p", "tools": None, "response_a": "a", "response_b": "b", **seen},
        {"number": 1, "prompt": CHAT, "tools": TOOLS, "response_a": "c", "response_b": "d", **seen},
    ]
    assert not re.search("policy|against|models|sft", text)


ANY_TEXT = st.sampled_from([text for text in HARD.values() if text]) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12
).filter(str.strip)


@given(st.lists(st.tuples(ANY_TEXT, ANY_TEXT), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
def test_texts_of_any_kind_are_the_same_in_file_table_and_preferences(pairs: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tables = collected(folder, [(prompt, text, f"{text}!") for prompt, text in pairs])
        prompts, texts = (list(column) for column in zip(*pairs, strict=True))
        lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        assert [json.loads(line)["response_a"] for line in lines] == texts
        assert [comparison_of(row).prompt for row in tables.load().table.to_dict("records")] == prompts
        source = given_answers(folder, *((number, "B", "anna", "") for number in range(len(texts))))
        checked = check_preferences(preferences(folder, source).load(), RewardModellingConfig())
        assert checked["prompt"].tolist() == prompts
        assert checked["rejected"].tolist() == texts
        assert checked["chosen"].tolist() == [f"{text}!" for text in texts]


@pytest.mark.parametrize("name", ["pairs.jsonl", "feedback_pairs/0.parquet"])
def test_a_file_that_exists_is_not_overwritten_and_nothing_else_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(DatasetError) as failed:
        collected(tmp_path, [("p", "a", "b")])
    assert f"{name}: this file exists" in str(failed.value.__cause__)
    assert [file.read_text() for file in tmp_path.rglob("*.*")] == ["mine"]


@pytest.mark.parametrize("export", ["pairs.jsonl", "~/pairs.jsonl"])
def test_preflight_looks_where_the_pairs_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: str
) -> None:
    """A relative path is below the project, though the command was typed in a sub-folder."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "notebooks")
    run: Any = SimpleNamespace(
        project_path=tmp_path, group=lambda *_: FeedbackConfig(export=export), writes=lambda name: True
    )
    assert list(check_feedback(run)) == []
    collected(tmp_path, [("p", "a", "b")], export=export)
    assert len((tmp_path / "pairs.jsonl").read_text().splitlines()) == 1
    assert not list(Path().iterdir())
    (problem,) = check_feedback(run)
    assert problem.startswith(f"feedback.export={export}: this file exists, and is not overwritten.")


@pytest.mark.parametrize(
    ("moment", "export"),
    [("before the file of the pairs", True), ("before the file of the pairs", False), ("after it", True)],
)
def test_pairs_of_a_run_that_was_killed_reach_their_file_at_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, export: bool
) -> None:
    child = os.fork()
    if child == 0:
        written = iter([written_whole, lambda *_: os._exit(9)])
        if moment == "after it":
            monkeypatch.setattr(Path, "rename", lambda *_: os._exit(9))
        else:
            monkeypatch.setattr(pair_tables, "written_whole", lambda file: next(written)(file))
        collected(tmp_path, [("p", "a", "b"), (CHAT, "c", "d")], **({} if export else {"export": None}))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    sheet = tmp_path / ("pairs.jsonl" if export else "feedback_pairs/sft.0.pairs.jsonl")
    assert sheet.exists() == (moment == "after it")
    for _ in range(2):
        pairs = PairTablesDataset(str(tmp_path / "feedback_pairs")).load()
        assert pairs.table["number"].tolist() == [0, 1]
        assert [json.loads(line)["number"] for line in sheet.read_text().splitlines()] == [0, 1]
        assert [file.name for file in (tmp_path / "feedback_pairs").glob("*.parquet")] == ["0.parquet"]
    seen = sheet.read_text()
    others = collected(tmp_path / "others", [("p", "a", "b"), (CHAT, "c", "d")])  # that nobody has killed
    assert (tmp_path / "others" / "pairs.jsonl").read_text() == seen
    (others.folder / "0.parquet").rename(others.folder / "0.unwritten.parquet")
    (tmp_path / "others" / "pairs.jsonl").write_text("of another program")
    with pytest.raises(DatasetError) as failed:
        others.load()
    assert re.fullmatch(
        r".*pairs\.jsonl: this file exists, and is not overwritten: the pairs of .*0\.unwritten\.parquet belong "
        r"there\. Move the file, or remove the table, whose pairs nobody has seen\.",
        str(failed.value.__cause__),
    )
    assert (tmp_path / "others" / "pairs.jsonl").read_text() == "of another program"


def test_a_damaged_table_of_pairs_is_named_in_one_line(tmp_path: Path) -> None:
    tables = collected(tmp_path, [("p", "a", "b")])
    file = tmp_path / "feedback_pairs/0.parquet"
    pd.read_parquet(file).drop(columns="policy_is_a").to_parquet(file)
    for how in ("no column policy_is_a", ""):
        with pytest.raises(DatasetError) as failed:
            tables.load()
        assert re.fullmatch(rf"{file}: .*damaged: {how}.*Restore the file\.", str(failed.value.__cause__))
        file.write_bytes(file.read_bytes()[:100])


def test_two_pairs_of_one_number_are_refused(tmp_path: Path) -> None:
    tables = collected(tmp_path, [("p", "a", "b")])
    shutil.copy(tmp_path / "feedback_pairs/0.parquet", tmp_path / "feedback_pairs/copy of 0.parquet")
    with pytest.raises(DatasetError) as failed:
        tables.load()
    assert re.search(r"feedback_pairs: two pairs have the number 0\.", str(failed.value.__cause__))


def test_the_preferred_side_is_chosen_and_the_rest_is_counted(tmp_path: Path, caplog: Any) -> None:
    collected(tmp_path, [(f"prompt {n}", f"a{n}", f"b{n}") for n in range(7)] + [("p", "a", " ")])
    votes = [["A"], ["B"], ["tie"], ["both bad"], ["A", "B"], ["B", "A", "B"], [], ["A"]]
    rows = [(n, value, f"person {who}", "") for n, values in enumerate(votes) for who, value in enumerate(values)]
    dataset = preferences(tmp_path, given_answers(tmp_path, *rows))
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        table: Any = dataset.load()
        dataset.load()
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in table] == [
        ("prompt 0", "a0", "b0"),
        ("prompt 1", "b1", "a1"),
        ("prompt 5", "b5", "a5"),
    ]
    # by hand: of pairs 4 (A B) and 5 (B A B) the observed disagreement is (2 * 1 + 3 * 2/3) / 5, and of 2 A and 3 B the
    # expected one 12 / 20
    [line] = [line for line in caplog.messages if "pairs are used" in line]
    assert line.endswith(
        "answers.jsonl: 3 of 7 answered pairs are used; 1 ties, 1 both bad, 1 without a majority, 1 with a blank "
        "response. 3 people, whose agreement (Krippendorff's alpha) is -0.33."
    )


def test_the_newest_answer_of_each_person_counts_and_what_is_no_answer_is_named(tmp_path: Path, caplog: Any) -> None:
    collected(tmp_path, [("p", "a", "b"), ("q", "c", "d"), ("r", "e", "f")])
    rows = [(0, "A", "anna", "2026-01-02"), (0, "B", "anna", "2026-01-01"), (1, "B", "ben", ""), (2, "C", "ben", "")]
    table: Any = preferences(tmp_path, given_answers(tmp_path, *rows, (5, "A", "ben", ""))).load()
    assert [(row["chosen"], row["rejected"]) for row in table] == [("a", "b"), ("d", "c")]
    assert "1 of 3 numbers are of no pair" in caplog.text
    assert "1 answers are not one of A, B, tie, both bad and are left out: C." in caplog.text


def test_answers_in_csv_are_read_and_an_empty_cell_is_no_answer(tmp_path: Path, caplog: Any) -> None:
    collected(tmp_path, [("p", "a", "b"), ("q", "c", "d"), ("r", "e", "f")])
    (tmp_path / "answers.csv").write_text("number,answer\n0,B\n1,\n2,A\n")
    table: Any = preferences(tmp_path, tmp_path / "answers.csv").load()
    assert [row["chosen"] for row in table] == ["b", "e"]
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([("p1", "A", "", "")], r"answers\.jsonl: row 0: number='p1' is not the number of a pair"),
        (
            [(0, "", "", ""), (1, "a", "", "")],
            r"answers\.jsonl: no pair is answered yet\. An answer is one of A, B, tie",
        ),
        ([(8, "A", "", ""), (9, "A", "", "")], r"answers\.jsonl: .*no pair of these numbers, for example 8\."),
        ([(0, "tie", "", "")], r"answers\.jsonl: nobody has preferred a response yet in 1 pairs"),
        ([(0, "A", "", ""), (1, "A", "", "")], r"answers\.jsonl: .*pairs of texts and of chats"),
    ],
)
def test_answers_that_prefer_nothing_or_do_not_fit_are_refused(
    tmp_path: Path, rows: list[tuple[Any, str, str, str]], reason: str
) -> None:
    collected(tmp_path, [("p", "a", "b"), (CHAT, "a", "b")])
    with pytest.raises(DatasetError) as failed:
        preferences(tmp_path, given_answers(tmp_path, *rows)).load()
    assert isinstance(failed.value.__cause__, DataError)
    assert re.search(reason, str(failed.value.__cause__))


def test_a_chat_comes_back_as_a_chat_with_its_answer_and_its_tools(tmp_path: Path) -> None:
    collected(tmp_path, [(CHAT, "good", "bad")])
    table: Any = preferences(tmp_path, given_answers(tmp_path, (0, "A", "anna", ""))).load()
    [row] = check_preferences(table, RewardModellingConfig()).to_dict("records")
    assert row["prompt"] == CHAT
    assert row["chosen"] == [{"role": "assistant", "content": "good"}]
    assert row["rejected"] == [{"role": "assistant", "content": "bad"}]
    assert row["tools"] == TOOLS


def test_peoples_agreement_is_logged_and_no_column_is_told_to_be_unused(
    tmp_path: Path, store: str, caplog: Any
) -> None:
    collected(tmp_path, [("p", "a", "b"), ("q", "c", "d")])
    rows = [(0, "A", "anna", ""), (0, "A", "ben", ""), (1, "B", "anna", ""), (1, "B", "ben", "")]
    table = preferences(tmp_path, given_answers(tmp_path, *rows)).load()
    with mlflow.start_run() as run:
        check_preferences(table, RewardModellingConfig())
    assert mlflow.get_run(run.info.run_id).data.metrics == {"feedback/agreement": 1.0}
    assert "not used" not in caplog.text


def test_the_answers_of_a_queue_are_written_once_and_read_as_a_file(tmp_path: Path, store: str) -> None:
    tables = collected(tmp_path, [("p", "a0", "b0"), ("q", "a1", "b1")])
    pairs = [comparison_of(row) for row in tables.load().table.to_dict("records")]
    mlflow_queue.put("sft", pairs, "?")
    answer(0, "A", "anna", rationale="shorter")
    dataset = preferences(tmp_path, "mlflow:sft")
    before = dataset.fingerprint()
    answer(1, "B", "anna")
    assert [row["chosen"] for row in dataset.load() or []] == ["a0"]  # the run has read the answers
    assert dataset.fingerprint() == before
    [first] = (tmp_path / "feedback_pairs").glob("sft.answers.*.jsonl")
    [row] = [json.loads(line) for line in first.read_text().splitlines()]
    assert (row["number"], row["answer"], row["person"], row["rationale"]) == (0, "A", "anna", "shorter")
    later: Any = preferences(tmp_path, "mlflow:sft")
    assert [row["chosen"] for row in later.load()] == ["a0", "b1"]
    assert later.fingerprint() != before
    mlflow.MlflowClient().delete_experiment("1")  # the files are enough to train on the same answers again
    again: Any = preferences(tmp_path, first)
    assert [row["chosen"] for row in again.load()] == ["a0"]
    assert again.fingerprint() == before
