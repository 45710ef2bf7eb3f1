"""No column, nested key, type or digit of a table's files is lost without a word."""

import csv
import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.sources import load_table

LARGE = 10_500_000  # bytes; `datasets` takes the columns of JSON from the first 10 MiB


def rows_of(path, cache):
    return [*load_table(str(path), cache=str(cache))]


def write_json(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


USER = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "y"]}}}]}
TOOL = {"name": "f", "parameters": {"properties": {"x": {"type": "integer", "enum": [1, 2]}}}}


PLAIN = {"messages": [{"role": "user", "content": "x" * 7_000}], "answer": 0.5}
OTHERS = [
    {"messages": [USER], "answer": "x", "tools": [TOOL], "system": "Be brief."},
    {"messages": [USER, CALL], "answer": None},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "5"}]}, {"role": "user", "content": "5"}]},
    {"messages": "a text in place of a chat", "answer": 3},
    {"messages": [{**USER, "weight": 0}], "answer": 2**53 + 1},
    {"messages": [USER], "answer": 10**30},
    {"messages": [USER], "answer": ["a"]},
]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_number_keeps_its_digits_beside_columns_of_mixed_values(tmp_path, ending):
    rows = [{"reward": 0.8474337369372327, "x": 2**64, "y": {"a": 1}}, {"reward": 1e-17, "x": "x", "y": {"b": 2}}]
    path = tmp_path / f"a.{ending}"
    path.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    assert rows_of(path, tmp_path / "cache") == rows


@pytest.mark.parametrize("cache", ["cache", None])
@pytest.mark.parametrize(
    ("ending", "options"),
    [
        *((ending, {}) for ending in ("jsonl", "jsonl.gz", "csv", "txt", "txt.gz", "parquet", "arrow")),
        *((ending, {"encoding": "utf-8"}) for ending in ("jsonl", "jsonl.gz", "csv.gz")),
    ],
)
def test_a_changed_file_gives_its_new_rows_even_with_the_same_time_and_size(tmp_path, ending, options, cache):
    path, found = tmp_path / f"a.{ending}", []
    for text in ("old words", "new words"):
        if ending in ("parquet", "arrow"):
            write_table(path, [{"prompt": text}])
        else:
            line = json.dumps({"prompt": text}) if "json" in ending else text
            content = f"{'prompt' if 'csv' in ending else line}\n{line}\n".encode()
            path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        where = cache and str(tmp_path / cache)
        table = load_table(str(path), cache=where, text_column="prompt", load_args=options)
        found.append((table[-1], table.map(lambda row: {"length": row["prompt"][:3]})[-1]["length"]))
    assert found == [({"prompt": "old words"}, "old"), ({"prompt": "new words"}, "new")]


def test_the_same_rows_at_another_place_and_time_are_read_from_the_cache(tmp_path):
    files = set()
    for name in ("a.jsonl", "b.jsonl"):
        write_json(tmp_path / name, [{"a": 1}])
        os.utime(tmp_path / name, (len(files), len(files)))
        (entry,) = load_table(str(tmp_path / name), cache=str(tmp_path / "cache")).cache_files
        files.add(entry["filename"])
    (file,) = files
    assert file.startswith(str(tmp_path / "cache/json"))  # where `kedro clean` looks for caches


def test_what_stands_behind_the_first_block_comes_through(tmp_path):
    rows = [*[PLAIN] * (LARGE // 7_000), *OTHERS]
    table = load_table(str(write_json(tmp_path / "a.jsonl", rows)), cache=str(tmp_path / "cache"))
    nothing = dict.fromkeys(("messages", "answer", "tools", "system"))
    assert [table[0], *table.select(range(len(rows) - len(OTHERS), len(rows)))] == [
        nothing | row for row in (PLAIN, *OTHERS)
    ]


@pytest.mark.parametrize("last", OTHERS)
def test_what_only_the_second_file_has_comes_through(tmp_path, last):
    write_json(tmp_path / "a-1.jsonl", [PLAIN] * 2)
    write_json(tmp_path / "a-2.jsonl.gz", [last])
    first, _, second = rows_of(tmp_path / "a-*", tmp_path / "cache")
    assert (first, second) == (dict.fromkeys(last) | PLAIN, dict.fromkeys(PLAIN) | last)


@pytest.mark.parametrize(
    "values",
    [
        ["5", 5],
        ["true", {"a": 1}],
        ['{"a": 1}', [1]],
        ["null", 1.5],
        [0.8474337369372327, 1e-17, "x"],
        [2**64, 1],
        [2**63 - 1, -(2**63)],
        [2**53 + 1, 0.5],
        [True, 1],
        [{}, {"a": None}],
        [[], ["a"], None],
        ["2020-01-01", "2021-01-01"],
        ["2020-01-01", "soon"],
        [[[1], ["a"]]],
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_values_of_json_are_what_stands_there_with_their_types(tmp_path, values, ending):
    path = tmp_path / f"a.{ending}"
    rows = [{"x": value, "y": [{"z": value}]} for value in values]
    path.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    found = rows_of(path, tmp_path / "cache")
    assert found == rows
    assert repr([row["x"] for row in found]) == repr(values)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from("xy"), VALUES, min_size=1), min_size=1, max_size=4),
    lines=st.booleans(),
    escaped=st.booleans(),
)
def test_json_comes_back_as_it_stands(tmp_path_factory, rows, lines, escaped):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "property.json"
    texts = [json.dumps(row, ensure_ascii=escaped) for row in rows]
    path.write_text("\n".join(texts) if lines else f"[{','.join(texts)}]", encoding="utf-8")
    found = rows_of(path, folder / "cache")
    for name in {name for row in rows for name in row}:
        column = [row.get(name) for row in rows]
        if {*map(type, column)} - {type(None)} == {int, float} and all(
            abs(x) <= 2**53 for x in column if type(x) is int
        ):
            column = [None if value is None else float(value) for value in column]
        assert repr([row[name] for row in found]) == repr(column)


def test_objects_that_are_spread_over_lines_are_read(tmp_path):
    rows = [{"a": 1, "b": ["x"]}, {"a": 2, "b": []}]
    path = tmp_path / "a.json"
    for text in ("\n".join(json.dumps(row, indent=2) for row in rows), json.dumps(rows, indent=1)):
        path.write_text("\n" + text)
        assert rows_of(path, tmp_path / "cache") == rows


def write_table(path, rows):
    columns = dict.fromkeys(name for row in rows for name in row)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": "x"}, {"a": "y", "b": "z"}),
        ({"a": "x", "b": None}, {"a": "y", "b": "z"}),
        ({"a": "x", "b": None}, {"a": "y", "b": 3}),
        ({"a": 1}, {"a": 0.5}),
        ({"a": None, "b": "x"}, {"b": "y"}),
    ],
)
def test_files_of_one_table_have_the_columns_of_all_files(tmp_path, ending, first, second):
    write_table(tmp_path / f"part-1.{ending}", [first])
    write_table(tmp_path / f"part-2.{ending}", [second])
    names = first | second
    expected = [{name: row.get(name) for name in names} for row in (first, second)]
    if ending == "csv" and expected == [{"a": 1}, {"a": 0.5}]:
        expected = [{"a": "1"}, {"a": "0.5"}]  # as a fraction, 1 would be 1.0
    assert rows_of(tmp_path, tmp_path / "cache") == expected


def test_nested_columns_of_parquet_have_the_keys_of_all_files(tmp_path):
    write_table(tmp_path / "1.parquet", [{"m": [{"role": "user"}]}])
    write_table(tmp_path / "2.parquet", [{"m": [{"role": "assistant", "calls": [{"name": "f"}]}]}])
    first, second = (row["m"][0] for row in rows_of(tmp_path, tmp_path / "cache"))
    assert first == {"role": "user", "calls": None}
    assert second == {"role": "assistant", "calls": [{"name": "f"}]}


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("first", "second"), [(1, "two"), ("two", 1), (0.5, 2**53 + 1), (["a"], "a"), (True, 1), ("a", b"b")]
)
def test_files_of_one_table_whose_types_differ_are_refused_with_file_and_column(tmp_path, ending, first, second):
    write_table(tmp_path / f"part-1.{ending}", [{"a": "x", "score": first}])
    write_table(tmp_path / f"part-2.{ending}", [{"a": "x", "score": second}])
    with pytest.raises(DataError) as refused:
        rows_of(tmp_path, tmp_path / "cache")
    assert str(refused.value).startswith(str(tmp_path / "part-"))
    assert "score" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("first", "second"), [("1", "two"), ("0.5", str(2**53 + 1)), ("true", "1"), (str(2**63), "-1"), ("1", str(2**64))]
)
def test_a_column_of_csv_whose_types_differ_between_files_is_text_as_in_one_file(tmp_path, first, second):
    (tmp_path / "1.csv").write_text(f"a,score\nx,{first}\n")
    (tmp_path / "2.csv").write_text(f"a,score\nx,{second}\n")
    (tmp_path / "both").mkdir()
    (tmp_path / "both/both.csv").write_text(f"a,score\nx,{first}\nx,{second}\n")
    expected = [{"a": "x", "score": first}, {"a": "x", "score": second}]
    assert rows_of(tmp_path / "?.csv", tmp_path / "cache") == expected
    assert rows_of(tmp_path / "both", tmp_path / "cache") == expected


def test_one_damaged_file_of_several_is_named(tmp_path):
    write_table(tmp_path / "1.parquet", [{"a": "x"}])
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"2\.parquet: cannot be loaded"):
        rows_of(tmp_path, tmp_path / "cache")


def test_a_header_that_has_a_column_twice_is_refused(tmp_path):
    (tmp_path / "1.csv").write_text("prompt,answer,prompt\na,b,c\n")
    with pytest.raises(DataError, match=r"1\.csv: the header has the column `prompt` twice"):
        rows_of(tmp_path / "1.csv", tmp_path)


@pytest.mark.parametrize("constant", ["Infinity", "-Infinity"])
def test_a_constant_that_json_does_not_have_is_refused(tmp_path, constant):
    (tmp_path / "1.jsonl").write_text(f'{{"a": [1.0]}}\n{{"a": [{constant}]}}\n')
    with pytest.raises(DataError, match=rf"1\.jsonl: line 2 cannot be read: {constant} is no number of JSON\. Write a"):
        rows_of(tmp_path / "1.jsonl", tmp_path)


def test_a_number_that_is_too_large_for_a_float_is_refused(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"a": {"b": 1.0}}\n{"a": {"b": 1e400}}\n')
    with pytest.raises(DataError, match=r"1\.jsonl: line 2 cannot be read: the number 1e400 is too large"):
        rows_of(tmp_path / "1.jsonl", tmp_path)
