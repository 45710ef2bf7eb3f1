import json

import pandas as pd

from ppo_rlhf.datasets import OptionalTableDataset, TableDataset

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
