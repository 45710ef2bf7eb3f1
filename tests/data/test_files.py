"""Which files of a folder are read: the splits, the configurations of a README, and what is left out."""

import json
import logging
import re

import datasets
import pytest

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.files import find
from ppo_rlhf.data.sources import load_table
from ppo_rlhf.runtime import log_lines


def write(folder, *names):
    """Write files of one row; the row's text is the file's name without its ending."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            datasets.Dataset.from_dict({"prompt": [name.split(".")[0]]}).to_parquet(str(path))
        else:
            path.write_text(json.dumps({"prompt": name.split(".")[0]}) + "\n")
    return folder


def prompts_of(source, tmp_path, **options):
    return load_table(str(source), cache=str(tmp_path / "cache"), **options)["prompt"][:]


@pytest.mark.parametrize(
    ("names", "train"),
    [
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], 2),
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], 1),
        (["train.jsonl", "validation.jsonl", "eval.jsonl"], 1),
        (["my_train_1.jsonl", "my_train_2.jsonl", "my.dev.jsonl"], 2),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], 2),
        (["training-1.jsonl", "valid-1.jsonl", "notes.jsonl"], 1),
        (["data/train_sft-00000-of-00001.jsonl", "data/train-00000-of-00001.jsonl"], 1),
    ],
)
def test_of_a_folder_with_splits_train_is_read_and_one_line_names_what_is_not(tmp_path, caplog, names, train):
    folder = write(tmp_path / "set", *names)
    log_lines.said.clear()
    with caplog.at_level(logging.WARNING):
        found = prompts_of(folder, tmp_path)
    expected = [name for name in names if "train" in name.lower() and "train_sft" not in name]
    assert found == [name.split(".")[0] for name in expected]
    assert len(found) == train
    (line,) = caplog.messages
    assert "the split `train` is read from " in line
    assert all((name in line.split("; not read: ")[name not in expected]) for name in names)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["test.jsonl", "validation.jsonl"], "validation, test"),
        (["data/train_sft-00000-of-00001.jsonl", "data/train_gen-00000-of-00001.jsonl"], "train_gen, train_sft"),
        (["part-1.jsonl", "test-2.jsonl"], "test, and files of no split: part-1.jsonl"),
    ],
)
def test_several_splits_without_train_are_refused_with_their_names(tmp_path, names, splits):
    folder = write(tmp_path / "set", *names)
    with pytest.raises(DataError, match="Name one split, as in") as refused:
        find(str(folder))
    listed = str(refused.value).split("the folder has the splits ")[1].split(". Name")[0]
    assert sorted(listed.split(", ")) == sorted(splits.split(", "))


def test_a_split_of_a_folder_is_named_behind_a_colon_or_by_load_args(tmp_path):
    folder = write(tmp_path / "set", "train.jsonl", "test.jsonl")
    (folder / "test.jsonl").write_text("".join(json.dumps({"prompt": str(row)}) + "\n" for row in range(10)))
    assert prompts_of(f"{folder}:train", tmp_path) == ["train"]
    assert prompts_of(f"{folder}:test[:20%]", tmp_path) == ["0", "1"]
    assert prompts_of(f"{folder}:test[-1:]", tmp_path) == ["9"]
    assert prompts_of(folder, tmp_path, load_args={"split": "test[8:]"}) == ["8", "9"]
    assert prompts_of(folder / "test.jsonl", tmp_path, load_args={"split": "train[:1]"}) == ["0"]
    for source, message in ((f"{folder}:dev", "has no split `dev`; its splits are"), (f"{folder}:a+b", "is given as")):
        with pytest.raises(DataError, match=message):
            find(source)


def test_a_split_of_a_saved_folder_is_named_behind_a_colon(tmp_path):
    table = datasets.Dataset.from_dict({"prompt": ["a", "b", "c", "d"]})
    datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk(str(tmp_path / "set"))
    assert prompts_of(f"{tmp_path / 'set'}:test", tmp_path) == ["d"]
    assert prompts_of(f"{tmp_path / 'set'}:train[:50%]", tmp_path) == ["a", "b"]


def test_a_saved_table_without_splits_refuses_a_split_and_no_saved_folder_has_configurations(tmp_path):
    table, one, several = datasets.Dataset.from_dict({"prompt": ["a", "b"]}), tmp_path / "one", tmp_path / "several"
    table.save_to_disk(str(one))
    datasets.DatasetDict({"train": table}).save_to_disk(str(several))
    assert prompts_of(f"{one}:train", tmp_path) == ["a", "b"]
    assert prompts_of(f"{one}:train[:50%]", tmp_path) == ["a"]
    for source, options in ((f"{one}:test", {}), (f"{one}:test[:50%]", {}), (one, {"load_args": {"split": "test"}})):
        with pytest.raises(DataError, match=f"^{re.escape(str(source))}: the folder holds one table without splits"):
            prompts_of(source, tmp_path, **options)
    for source in (f"{one}#main", f"{several}#main:train"):
        with pytest.raises(DataError, match=f"^{source}: .* no configurations. Leave out `#main`"):
            prompts_of(source, tmp_path)


CONFIGURED = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/part-*
  - split: test
    path: main/held.jsonl
- config_name: other
  data_dir: other
---
# A card
"""


def test_the_configurations_of_a_readme_are_followed(tmp_path):
    folder = write(tmp_path / "a[b]", "main/part-1.jsonl", "main/held.jsonl", "other/train.jsonl", "other/test.jsonl")
    (folder / "README.md").write_text(CONFIGURED)
    (folder / "dataset_infos.json").write_text('{"default": {}}')
    assert prompts_of(folder, tmp_path) == ["main/part-1"]
    assert prompts_of(f"{folder}:test", tmp_path) == ["main/held"]
    assert prompts_of(f"{folder}#other", tmp_path) == ["other/train"]
    assert prompts_of(f"{folder}#other:test", tmp_path) == ["other/test"]
    with pytest.raises(DataError, match=r"README\.md has the configurations main, other"):
        find(f"{folder}#third")
    (folder / "README.md").write_text(CONFIGURED.replace("  default: true\n", ""))
    with pytest.raises(DataError, match=r"README\.md has the configurations main, other"):
        find(str(folder))
    (folder / "README.md").write_text(CONFIGURED.replace("  default: true", '  default: true\n  sep: ";"'))
    with pytest.raises(DataError, match="sets sep, which is not read"):
        find(str(folder))
    (folder / "README.md").write_text(CONFIGURED.replace("main/part-*", "main/absent-*"))
    with pytest.raises(DataError, match=r"README\.md names no file that exists for the split train"):
        find(str(folder))


def test_files_that_describe_a_data_set_are_no_data(tmp_path):
    folder = write(tmp_path / "set", "data/rows.jsonl", "dataset_infos.json", "dataset_info.json", ".cache/x.json")
    (folder / "README.md").write_text("# No configurations\n")
    assert prompts_of(folder, tmp_path) == ["data/rows"]


def test_the_files_of_a_glob_are_one_table_and_named(tmp_path, caplog):
    write(tmp_path, "train-1.jsonl", "test-1.jsonl")
    log_lines.said.clear()
    with caplog.at_level(logging.WARNING):
        assert prompts_of(tmp_path / "t*.jsonl", tmp_path) == ["test-1", "train-1"]
    assert "read as one table: test-1.jsonl, train-1.jsonl" in caplog.text


@pytest.mark.parametrize("pattern", ["data/part-*/train.jsonl", "data/**/train.jsonl", "data/**", "da*/p*/t*"])
def test_a_wildcard_may_stand_in_the_name_of_a_folder(tmp_path, caplog, pattern):
    names = ["data/part-1/train.jsonl", "data/part-2/train.jsonl"]
    write(tmp_path, *names)
    log_lines.said.clear()
    with caplog.at_level(logging.WARNING):
        assert prompts_of(tmp_path / pattern, tmp_path) == [name.split(".")[0] for name in names]
    inner = [name.removeprefix("data/") for name in names] if pattern.startswith("data/") else names
    assert f"read as one table: {', '.join(inner)}." in caplog.text


def test_a_glob_matches_files_only_and_folders_that_exist_are_no_patterns(tmp_path, monkeypatch):
    write(tmp_path, "run[1]/a.jsonl", "run[1]/b.jsonl/inner.txt", "run1/a.jsonl")
    assert prompts_of(tmp_path / "run[1]/*.jsonl", tmp_path) == ["run[1]/a"]
    monkeypatch.chdir(tmp_path)
    assert prompts_of("run?/*.jsonl", tmp_path) == ["run1/a"]
    for absent in ("run*/c.jsonl", "gone-*/**/a.jsonl", "run[1]/b*"):
        with pytest.raises(DataError, match="this data file does not exist"):
            find(absent)


def test_files_of_several_folders_are_named(tmp_path, caplog):
    folder = write(tmp_path / "set", "split=train/a.jsonl", "split=test/a.jsonl")
    log_lines.said.clear()
    with caplog.at_level(logging.WARNING):
        assert prompts_of(folder, tmp_path) == ["split=test/a", "split=train/a"]
    assert "is read from split=test/a.jsonl, split=train/a.jsonl." in caplog.text
