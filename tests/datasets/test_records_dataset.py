import gzip
import hashlib
import json
import logging
import re
import sys
from unittest.mock import Mock

import datasets
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from datasets.exceptions import DatasetNotFoundError
from kedro.io import DatasetError

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.sources import load_table
from ppo_rlhf.data.tables import origins_of
from ppo_rlhf.datasets import RecordsDataset, ReferenceTextsDataset
from ppo_rlhf.models.origins import Origin

ROWS = [{"prompt": "once upon", "label": 1}, {"prompt": "ünïcode ✓", "label": 0}]


def write(path, rows=ROWS):
    frame = pd.DataFrame(rows)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


def message_of(path, **options) -> str:
    """Return the text of the cause of Kedro's error; the command line shows only this text."""
    with pytest.raises(DatasetError) as caught:
        RecordsDataset(str(path), **options).load()
    assert isinstance(caught.value.__cause__, DataError)
    message = str(caught.value.__cause__)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_chats_are_lists_of_messages_whatever_the_format(tmp_path, ending):
    rows = [{"prompt": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}]
    frame = RecordsDataset(str(write(tmp_path / f"chats.{ending}", rows))).load()
    assert frame.to_list() == rows
    assert type(frame["prompt"][0]) is list


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path, ending):
    frame = RecordsDataset(str(write(tmp_path / f"rows.{ending}"))).load()
    assert frame.to_list() == ROWS


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_a_missing_value_is_none_and_leaves_the_others_as_they_are(tmp_path, ending):
    """pandas would turn the numbers into floats: 3.0, and 9007199254740992 for the other number."""
    rows = [{"prompt": "a", "answer": 3}, {"prompt": "b"}, {"prompt": "c", "answer": 2**53 + 1}]
    path = tmp_path / f"rows.{ending}"
    if ending == "csv":
        path.write_text(f"prompt,answer\na,3\nb,\nc,{2**53 + 1}\n")
    elif ending == "parquet":
        numbers = pyarrow.array([row.get("answer") for row in rows], pyarrow.int64())
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "answer": numbers}), path)
    else:
        write(path, rows)
    found = RecordsDataset(str(path)).load()["answer"][:]
    assert found == [3, None, 2**53 + 1]
    assert [type(value) for value in found] == [int, type(None), int]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "", "-20"], [1, None, -20]),
        (["1.0", "0.5", "1e-05", "-0.0"], [1.0, 0.5, 1e-05, -0.0]),
        (["True", "False", ""], [True, False, None]),
        (["", ""], [None, None]),
        (["1", str(2**63 - 1)], [1, 2**63 - 1]),
    ],
)
def test_a_column_of_csv_whose_cells_all_print_as_they_stand_has_their_type(tmp_path, cells, expected):
    path = tmp_path / "rows.csv"
    path.write_text("label,other\n" + "".join(f"{cell},x\n" for cell in cells))
    found = RecordsDataset(str(path)).load()["label"][:]
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    "cells",
    [
        *(
            ["007", "42"],
            ["1.10", "2.5"],
            ["+5"],
            ["1e3"],
            ["0171234"],
            ["5.", ".5"],
            [" 12", "13 "],
            ["-0"],
            ["1_000"],
        ),
        *(["0.50", "0.25"], ["1", "0.5"], ["inf", "0.5"], ["nan"], ["1E5"], ["1e+05"], ["0x1f"], ["٣"], [str(2**63)]),
        *(["true", "false"], ["TRUE"], ["None", "NA", "null", "nan"], ["0.1234567890123456789"], ["1,5", "2,5"]),
    ],
)
def test_any_other_column_of_csv_is_text_cell_by_cell(tmp_path, cells):
    path = tmp_path / "rows.csv"
    path.write_text("label,other\n" + "".join(f'"{cell}",x\n' for cell in [*cells, ""]))
    assert RecordsDataset(str(path)).load()["label"][:] == [*cells, None]


def test_a_column_of_csv_that_looks_like_numbers_and_is_text_is_named(tmp_path, caplog):
    path = tmp_path / "rows.csv"
    path.write_text("label,name,prompt\n7,x,007\n1.10,007,1\n")
    RecordsDataset(str(path)).load()
    assert caplog.messages == [f"{path}: the column `label` is read as text: its cell '7' would else become 7.0."]


@pytest.mark.parametrize(
    "content",
    [
        'prompt;label\n"a; b";1,5\nc, d;2\n',
        "prompt\tlabel\na; b\t1,5\nc, d\t2\n",
        "sep=;\nprompt;label\na; b;1,5\nc, d;2\n".replace("a; b", '"a; b"'),
        'sep=|\r\nprompt|label\r\na; b|1,5\r\n"c, d"|2\r\n',
        '\n"prompt","label"\n"a; b","1,5"\n\n"c, d",2\n   \n',
    ],
    ids=["semicolons", "tabs", "sep=;", "sep=|", "commas and blank lines"],
)
def test_csv_of_other_delimiters_gives_the_same_rows(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode())
    expected = [{"prompt": "a; b", "label": "1,5"}, {"prompt": "c, d", "label": "2"}]
    assert RecordsDataset(str(path)).load().to_list() == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('prompt,answer\n"say \\"hi\\" now",1\n', "line 2: text follows a closing quote .* A backslash stands before"),
        ('prompt,answer\n"x",0\n"say \\"hi, all\\"",1\n', "line 3: .* A backslash stands before a quote"),
        ('prompt,answer\n"all \\"",1\n', "line 2: a quote opens here and never closes. A backslash"),
        ("prompt,answer\na\\, b,1\n", "line 2: it has more cells than the header, 3 instead of 2. A backslash"),
        ('prompt,answer\n"x\ny",0\n"a" b,1\n', "line 4: text follows a closing quote .* within a quoted text twice"),
        ("sep=;\n\nprompt;answer\na;b;1\n", "line 4: it has more cells .* Quote texts that contain semicolons or line"),
        ("prompt,answer\nfirst line\nsecond line,1\n", "line 2: it has fewer cells than the header, 1 instead of 2"),
        ("prompt,answer;unit\na,1;2\n", "the header has commas and semicolons outside of quotes"),
    ],
)
def test_csv_that_can_be_read_in_two_ways_is_refused_with_its_line_and_what_was_seen(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    assert re.search(message, message_of(path))


def test_a_cell_of_csv_may_be_long_and_have_quotes_commas_and_line_breaks(tmp_path):
    cells = ["x" * 200_000, 'say "hi", all\r\nand\nmore\\', '\\"', ""]
    pd.DataFrame({"a": cells, "b": "y"}).to_csv(tmp_path / "rows.csv")
    found = RecordsDataset(str(tmp_path / "rows.csv")).load()
    assert found["a"][:] == [*cells[:-1], None]
    assert found["Unnamed: 0"][:] == [0, 1, 2, 3]


def test_columns_of_csv_that_are_read_as_text_are_text_even_if_all_of_it_is_digits(tmp_path):
    names = ["prompt", "completion", "text", "chosen", "rejected", "question"]
    path = tmp_path / "rows.csv"
    path.write_text(",".join([*names, "label"]) + "\n" + "1,2,3,4,5,6,7\n" * 2)
    frame = RecordsDataset(str(path), text_column="question").load()
    assert frame.to_list() == [dict(zip(names, "123456", strict=True)) | {"label": 7}] * 2


def test_half_of_a_surrogate_pair_is_damage_and_a_whole_one_is_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"prompt": "\uD83D\uDE00"}')
    assert RecordsDataset(str(path)).load()["prompt"][:] == ["\U0001f600"]
    path.write_text(r'{"prompt": "half \uD83D"}')
    assert "surrogate pair" in message_of(path)


def test_plain_text_has_one_row_a_line_under_the_column_asked_for_and_blank_lines_are_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ppo_rlhf")
    (tmp_path / "prompts.txt").write_bytes("﻿once upon\r\n\r\n  twice\n".encode())
    frame = RecordsDataset(str(tmp_path / "prompts.txt"), text_column="prompt").load()
    assert frame.to_dict() == {"prompt": ["once upon", "  twice"]}
    assert caplog.messages == [f"{tmp_path / 'prompts.txt'}: 1 of 3 lines are blank, and are left out."]


def test_a_path_may_begin_at_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl")
    assert RecordsDataset("/project/~/rows.jsonl").load().to_list() == ROWS  # as Kedro passes the path


def test_an_input_that_was_not_given_is_none():
    dataset = RecordsDataset(None)
    assert dataset.load() is None
    assert not dataset.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n{"a": 3}\n', "line 2 is damaged: it is not valid JSON"),
        (
            "a.jsonl",
            b'{"a": 1}\n[1, 2]\n',
            r"line 2 is not an object with named columns: [1, 2]",
        ),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is damaged: it is not UTF-8 text"),
        ("a.csv", b"a,b\nx,y\nx,\xff\n", "line 3 is damaged: it is not UTF-8 text"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"[" * 100_000, "line 2 cannot be read: maximum recursion depth"),
        ("a.jsonl", b"", "this data file is empty"),
        ("a.jsonl", b"\n\n", "this data file has no rows"),
        ("a.jsonl", b'{"a": {"b": 1, "c": 2, "b": 3}}', "line 1 cannot be read: an object has the key `b` twice"),
        ("a.jsonl.gz", b"\x1f\x8b\x08no gzip", "this data file is damaged"),
        ("a.json", b'[{"a": 1},\n{"a": }]', "line 2 is damaged: it is not valid JSON"),
        ("a.json", b"[]", "this data file has no rows"),
        ("a.json", b'[{"a": 1}, 2]', "row 1 is not an object with named columns: 2"),
        ("a.csv", b'a,b\n1,2\n1,2,3\n"', "this CSV file is damaged"),
        ("a.csv", b"a,b\n", "this table has no rows"),
        ("a.parquet", b"PAR1 not really", "Parquet magic bytes not found in footer"),
        ("a.txt", b"\n \n", "this table has no rows"),
        ("a.xlsx", b"x", "files ending in .xlsx cannot be read"),
        ("a.jsonl.zst", b"x", "files ending in .zst cannot be read"),
        ("a.parquet.gz", b"x", "files ending in .gz cannot be read"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_that_names_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in message_of(tmp_path / name)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_one_byte_that_is_not_utf8_far_inside_a_chat_is_named_with_file_row_and_column(tmp_path, ending):
    """`datasets` accepts the byte; only reading that row would fail. The files have 10 and 2,500 rows."""
    for name, count, bad in (("a", 10, None), ("b", 2_500, 2_041)):
        texts = [b"good \xc3\xa9"] * count
        if bad is not None:
            texts[bad] = b"bad \xe9"
        path = tmp_path / f"{name}.{ending}"
        if ending == "jsonl":
            path.write_bytes(b"\n".join(b'{"id": 1, "prompt": [{"content": "%s"}]}' % text for text in texts))
        else:
            content = pyarrow.StructArray.from_arrays(
                [pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())], ["content"]
            )
            chats = pyarrow.ListArray.from_arrays(range(count + 1), content)
            pyarrow.parquet.write_table(pyarrow.table({"id": [1] * count, "prompt": chats}), path)
    with pytest.raises(DatasetError) as caught:
        RecordsDataset(str(tmp_path)).load()
    place = "row 2041, column `prompt`: the text is" if ending == "parquet" else "line 2042 is damaged: it is"
    assert str(caught.value.__cause__).startswith(f"{tmp_path / 'b'}.{ending}: {place} not UTF-8")


@pytest.mark.parametrize(
    "content",
    [
        "prompt\nHello, how are you\n",
        "prompt\nHello, how are you\nHi\n",
        "prompt\nHi\nHello, how are you\n",
        "prompt\nHello, how\nHello, how, are you\n",
        "prompt,label\nHello, how, are you,1\n",
    ],
)
def test_a_text_with_a_comma_and_no_quotes_is_refused_instead_of_losing_its_beginning(tmp_path, content):
    path = tmp_path / "prompts.csv"
    path.write_text(content)
    assert "it has more cells than the header" in message_of(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    assert "this data file does not exist" in message_of(tmp_path / "nothing.jsonl")
    assert "File name too long" in message_of(tmp_path / f"{'n' * 300}.jsonl")
    assert "folder" in message_of(tmp_path)


def test_a_persons_file_is_never_written(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    before = path.read_bytes()
    with pytest.raises(DatasetError, match="never written"):
        RecordsDataset(str(path)).save(pd.DataFrame(ROWS))
    assert path.read_bytes() == before


def test_the_preview_is_a_table_of_the_first_rows_that_json_can_hold(tmp_path):
    rows = [{"text": f"t{i}", "values": [i, i]} for i in range(9)]
    preview = RecordsDataset(str(write(tmp_path / "rows.jsonl", rows))).preview()
    assert json.loads(json.dumps(preview))["data"] == [[f"t{i}", f"[{i}, {i}]"] for i in range(5)]
    assert preview["columns"] == ["text", "values"]
    assert RecordsDataset(None).preview()["data"] == []


def shout(table):
    return table.map(lambda row: {"prompt": row["prompt"].upper()})


def nothing(table):
    return table.select([])


def ends(table):
    sys.exit("no more")


def test_a_function_of_ones_own_does_not_end_the_process(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    assert "ends raised SystemExit: no more" in message_of(path, prepare=f"{__name__}:ends")


def test_a_function_of_ones_own_makes_the_table_that_is_wanted(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    table = RecordsDataset(str(path), prepare=f"{__name__}:shout").load()
    assert table["prompt"][:] == ["ONCE UPON", "ÜNÏCODE ✓"]
    assert table["label"][:] == [1, 0]
    assert "nothing returned no rows" in message_of(path, prepare=f"{__name__}:nothing")
    other = write(tmp_path / "other.jsonl", [{"text": "a"}])
    assert "shout raised KeyError: 'prompt'" in message_of(other, prepare=f"{__name__}:shout")


def test_a_file_on_the_hub_is_read_from_its_copy_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "datasets--org--set", "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "refs/v2").write_text(commit)
    (repository / f"snapshots/{commit}/data").mkdir(parents=True)
    file = write(repository / f"snapshots/{commit}/data/train-0.parquet")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    for address in ("org/set/data/train-0.parquet", "org/set@v2/data/train-0.parquet"):
        dataset = RecordsDataset(f"hf://datasets/{address}", prepare=f"{__name__}:shout")
        assert dataset.load()["prompt"][:] == ["ONCE UPON", "ÜNÏCODE ✓"]
        [origin] = origins_of(dataset.load(), "prompts")
        assert (origin.source, origin.digest, origin.on_hub) == (f"hf://datasets/{address}", sha256, True)
        assert dataset._describe() == {"filepath": f"hf://datasets/{address}"}
        assert dataset.preview()["data"] == []


def test_an_address_of_the_hub_that_is_wrong_or_out_of_reach_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "is named hf://datasets/<owner>/<name>/<file>" in message_of("hf://datasets/gsm8k")
    assert "cannot be downloaded" in message_of("hf://datasets/org/set/train.parquet")  # tests have no network


# --- folders, shards, compressed files, and names on the hub


def rows_of(source, **options):
    return RecordsDataset(str(source), **options).load().to_list()


def test_a_folder_and_a_glob_are_read_as_one_table_in_the_order_of_the_names(tmp_path):
    for number in (2, 1):
        write(tmp_path / f"part-{number}.jsonl", [{"prompt": f"from {number}"}])
    expected = [{"prompt": "from 1"}, {"prompt": "from 2"}]
    assert rows_of(tmp_path) == rows_of(tmp_path / "part-*.jsonl") == expected
    write(tmp_path / "other.parquet")
    assert "files of several kinds (.jsonl, .parquet)" in message_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "pattern_for"),
    [
        ("prompts[v2].jsonl", "prompts2.jsonl"),
        ("run[1]/prompts.jsonl", "run1/prompts.jsonl"),
        ("what?.parquet", "whats.parquet"),
        ("all*.json", "all-others.json"),
        ("[a].csv", "a.csv"),
    ],
)
def test_a_path_that_exists_is_that_file_and_no_pattern(tmp_path, name, pattern_for):
    for place, text in ((name, "the right file"), (pattern_for, "another file")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write(tmp_path / place, [{"prompt": text}])
    expected = [{"prompt": "the right file"}]
    assert rows_of(tmp_path / name, cache={"path": str(tmp_path / "[c]?*")}) == expected
    if "/" in name:
        assert rows_of((tmp_path / name).parent) == expected


@pytest.mark.parametrize("name", ["x::y.jsonl", "x::y.csv", "a::b/rows.jsonl"])
def test_a_path_that_fsspec_takes_for_a_file_within_another_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    assert " :: " in message_of(write(tmp_path / name))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "txt"])
def test_compressed_files_are_read(tmp_path, ending):
    plain = write(tmp_path / f"rows.{ending}") if ending != "txt" else tmp_path / "rows.txt"
    if ending == "txt":
        plain.write_text("once upon\nünïcode ✓\n")
    packed = tmp_path / f"rows.{ending}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert rows_of(packed, text_column="prompt") == rows_of(plain, text_column="prompt")
    packed.write_bytes(b"no gzip")
    message_of(packed)


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_that_datasets_saved_is_read_and_of_several_splits_train(tmp_path, splits):
    table = datasets.Dataset.from_list(ROWS)
    saved = datasets.DatasetDict({"test": table.select([0]), "train": table}) if splits else table
    saved.save_to_disk(str(tmp_path / "saved"))
    assert rows_of(tmp_path / "saved") == ROWS
    if splits:
        assert rows_of(tmp_path / "saved", load_args={"split": "test"}) == ROWS[:1]
        assert "the splits are test, train" in message_of(tmp_path / "saved", load_args={"split": "dev"})


def test_arrow_files_are_written_below_the_cache_and_read_again_from_there(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    options = {"cache": {"path": str(tmp_path / "cache")}}
    files = [RecordsDataset(str(path), **options).load().cache_files for _ in range(2)]
    assert files[0] == files[1]
    assert all(entry["filename"].startswith(str(tmp_path / "cache")) for entry in files[0])
    write(path, [{"prompt": "changed"}])
    assert rows_of(path, **options) == [{"prompt": "changed"}]


@pytest.fixture
def hub(monkeypatch):
    """A fake of the hub that returns these rows and records the arguments of each call."""
    asked = []

    def load_dataset(path, **given):
        asked.append({"path": path, **{name: value for name, value in given.items() if name != "cache_dir"}})
        table = datasets.Dataset.from_list(ROWS)
        return table if "split" in given else datasets.DatasetDict({"train": table, "test": table.select([1])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("trl-lib/tldr", {"path": "trl-lib/tldr"}),
        ("org/name@v2", {"path": "org/name", "revision": "v2"}),
        (
            "org/name@refs/convert/parquet:test",
            {"path": "org/name", "revision": "refs/convert/parquet", "split": "test"},
        ),
        ("org/name:train[:10%]", {"path": "org/name", "split": "train[:10%]"}),
        ("org/name@v2#main:test", {"path": "org/name", "revision": "v2", "name": "main", "split": "test"}),
    ],
)
def test_a_data_set_on_the_hub_is_named_with_revision_configuration_and_split(hub, tmp_path, name, asked):
    assert rows_of(name) == ROWS
    (tmp_path / "pyproject.toml").touch()
    assert rows_of(tmp_path / name) == ROWS  # as Kedro passes a relative path
    assert hub == [asked, asked]
    assert RecordsDataset(name).preview()["data"] == []


def test_a_data_set_on_the_hub_is_known_by_its_commit_and_a_file_by_its_hash(tmp_path, monkeypatch):
    commit = "89abcdef01" * 4
    folder = tmp_path / "org___name/default/0.0.0" / commit  # where `datasets` keeps a table of the hub
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.load_from_disk(folder))
    assert origins_of(RecordsDataset("org/name@v2:train").load(), "prompts") == (
        Origin("table", "prompts", "org/name@v2:train", commit, on_hub=True),
    )
    monkeypatch.undo()
    file = write(tmp_path / "rows.jsonl")
    for options in ({}, {"prepare": f"{__name__}:shout"}):
        assert origins_of(RecordsDataset(str(file), **options).load(), "prompts") == (
            Origin("table", "prompts", "rows.jsonl", hashlib.sha256(file.read_bytes()).hexdigest()),
        )
    assert origins_of(datasets.Dataset.from_list(ROWS), "prompts") == origins_of(None, "prompts") == ()


def test_reference_texts_are_a_table_or_a_word_that_kedro_has_made_a_path(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    assert ReferenceTextsDataset(None).load() is None
    word = ReferenceTextsDataset(str(tmp_path / "held_out_demonstrations"))
    assert word.load() is None
    assert word._describe()["filepath"] is None
    table = write(tmp_path / "texts.jsonl", [{"text": "a"}])
    assert ReferenceTextsDataset(str(table)).load()["text"] == ["a"]


def test_the_hub_is_not_asked_for_a_table_that_a_folder_here_does_not_hold(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "prompts.jsonl").rename((tmp_path / "tables").mkdir() or tmp_path / "tables/prompts.jsonl")
    assert "this data file does not exist" in message_of("tables/promts")
    assert hub == []


def test_a_data_set_on_the_hub_may_be_described_in_the_catalog_but_not_twice(hub):
    assert rows_of("org/name", load_args={"split": "test", "revision": "v2"}) == ROWS
    assert hub == [{"path": "org/name", "split": "test", "revision": "v2"}]
    assert "load_args both give split" in message_of("org/name:train", load_args={"split": "test"})


def test_a_name_that_is_nothing_here_says_so_without_the_hubs_traceback(monkeypatch):
    missing = "org/name: there is no such file or folder, and "
    errors = (ConnectionError("Couldn't reach 'org/name' on the Hub"), DatasetNotFoundError("It doesn't exist."))
    for error in errors:
        monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
        with pytest.raises(DataError) as refused:
            load_table("org/name")
        assert str(refused.value).startswith(missing)
        assert str(refused.value).endswith(str(error))
        assert refused.value.__cause__ is None
        assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            DatasetNotFoundError("Dataset 'org/name' is a gated dataset on the Hub."),
            "set HF_TOKEN or run `hf auth login`",
        ),
        (DatasetNotFoundError("Dataset 'org/name' doesn't exist on the Hub."), "doesn't exist on the Hub"),
        (ConnectionError("Couldn't reach 'org/name' on the Hub (OfflineModeIsEnabled)"), "OfflineModeIsEnabled"),
        (ValueError("Unknown split 'dev'. Should be one of ['train']."), "Unknown split 'dev'"),
    ],
)
def test_a_data_set_on_the_hub_that_cannot_be_had_is_refused_in_one_line(monkeypatch, error, message):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert message in message_of("org/name")
