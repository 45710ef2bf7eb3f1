import json
import locale
from pathlib import Path

import pandas as pd
import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import AbstractDataset

from ppo_rlhf.datasets import (
    OptionalTableDataset,
    SpreadsheetDataset,
    TableDataset,
    TrainingHistoryDataset,
    TrainingPromptsDataset,
)
from ppo_rlhf.settings import CONFIG_LOADER_ARGS

CHAT = [{"role": "user", "content": "hé"}]


def test_the_preview_shows_the_first_rows_with_nested_values_as_text(tmp_path):
    dataset = TableDataset(filepath=str(tmp_path / "table.parquet"))
    dataset.save(pd.DataFrame({"text": ["a", "b", "c"], "ids": [[1, 2], [], [3]], "chat": [CHAT] * 3, "n": [1.5] * 3}))
    preview = dataset.preview(nrows=2)
    chat = '[{"role": "user", "content": "hé"}]'
    assert preview["columns"] == ["text", "ids", "chat", "n"]
    assert preview["data"] == [["a", "[1, 2]", chat, 1.5], ["b", "[]", chat, 1.5]]
    assert json.loads(json.dumps(preview)) == preview
    assert dataset.load()["ids"][0].tolist() == [1, 2]


def test_an_optional_table_is_none_until_it_is_written(tmp_path):
    dataset = OptionalTableDataset(filepath=str(tmp_path / "table.parquet"))
    assert dataset.load() is None
    dataset.save(pd.DataFrame({"text": ["a"]}))
    assert dataset.load()["text"].tolist() == ["a"]


def test_no_text_of_a_spreadsheet_is_a_formula_and_what_is_read_is_what_was_saved(tmp_path):
    texts = ["=1+1", "+a", "-a", "@a", "'a", "a", "", "7"]
    table = pd.DataFrame({"text": texts, "n": [-1.5] * len(texts)})
    path = tmp_path / "pairs.csv"
    options = {"save_args": {"index": False}, "load_args": {"keep_default_na": False, "dtype": {"text": str}}}
    dataset = SpreadsheetDataset(filepath=str(path), **options)
    dataset.save(table)
    cells = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert [text for text, _ in cells] == ["'=1+1", "'+a", "'-a", "'@a", "''a", "a", "", "7"]
    assert {number for _, number in cells} == {"-1.5"}
    pd.testing.assert_frame_equal(dataset.load(), table)


@pytest.fixture
def ascii_locale():
    """A container without a locale, in which Python's default encoding is ASCII."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def csv_entries(tmp_path):
    """The project's catalog entries of kedro-datasets' CSVDataset and of its subclasses in this package."""
    catalog = OmegaConfigLoader(str(Path(__file__).parents[2] / "conf"), **CONFIG_LOADER_ARGS)["catalog"].items()
    inner = {name: entry.get("dataset", entry) for name, entry in catalog if isinstance(entry, dict)}
    found = {name: entry for name, entry in inner.items() if entry["type"] == "pandas.CSVDataset"}
    assert found
    for name, entry in found.items():
        yield AbstractDataset.from_config(name, {**entry, "filepath": str(tmp_path / f"{name}.csv")})
    yield SpreadsheetDataset(filepath=str(tmp_path / "pairs.csv"))
    yield TrainingHistoryDataset(filepath=str(tmp_path / "history.csv"))


def test_tables_of_text_are_utf_8_whatever_the_locale(tmp_path, ascii_locale):
    table = pd.DataFrame({"text": ["größer 漢"]})
    for dataset in csv_entries(tmp_path):
        dataset.save(table)
        assert "größer 漢".encode() in Path(dataset._filepath).read_bytes()
        assert dataset.load()["text"].tolist() == ["größer 漢"]


def test_the_prompts_of_the_newest_training_are_not_those_of_a_policy_from_elsewhere(tmp_path):
    file = str(tmp_path / "training_prompts.parquet")
    assert TrainingPromptsDataset(filepath=file).load() is None
    TrainingPromptsDataset(filepath=file).save(pd.DataFrame({"prompt": ["a"]}))
    assert len(TrainingPromptsDataset(filepath=file).load()) == 1
    assert TrainingPromptsDataset(filepath=file, policy_path="elsewhere").load() is None
