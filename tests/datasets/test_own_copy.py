import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset

from ppo_rlhf.datasets.own_copy import OwnCopy, read_own_writes
from ppo_rlhf.hooks.provenance import input_tags

PIPELINE = Pipeline(
    [
        Node(lambda raw: (raw, raw, raw), "raw", ["table", "numbers", "report"], name="make"),
        Node(lambda table, numbers: numbers, ["table", "numbers"], "handed_on", name="read"),
    ]
)


def entries(folder: Path) -> dict[str, dict]:
    return {
        "raw": {"type": "json.JSONDataset", "filepath": f"{folder}/raw.json"},
        "table": {"type": "ppo_rlhf.datasets.TableDataset", "filepath": f"{folder}/t/table.parquet"},
        "numbers": {"type": "json.JSONDataset", "filepath": f"{folder}/numbers.json", "metadata": {"layer": "x"}},
        "report": {
            "type": "kedro_mlflow.io.artifacts.MlflowArtifactDataset",
            "dataset": {"type": "text.TextDataset", "filepath": f"{folder}/report.html"},
            "artifact_path": "report",
        },
        "handed_on": {"type": "kedro.io.MemoryDataset"},
    }


def catalog_of_a_run(folder: Path) -> DataCatalog:
    catalog = DataCatalog.from_config(entries(folder))
    read_own_writes(catalog, PIPELINE)
    return catalog


def test_a_run_reads_what_it_wrote_though_another_run_wrote_later(tmp_path):
    mine, other = catalog_of_a_run(tmp_path), catalog_of_a_run(tmp_path)
    mine.save("numbers", {"of": "mine"})
    other.save("numbers", {"of": "other"})
    assert mine.load("numbers") == {"of": "mine"}
    assert other.load("numbers") == {"of": "other"}
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"of": "other"}


def test_what_is_read_is_what_a_slice_would_read_from_the_file(tmp_path):
    """Parquet gives lists back as arrays, JSON gives tuples back as lists."""
    mine, later = catalog_of_a_run(tmp_path), DataCatalog.from_config(entries(tmp_path))
    mine.save("table", pd.DataFrame({"ids": [[1, 2], [3]]}))
    mine.save("numbers", {"pair": (1, 2)})
    for catalog in (mine, later):
        assert [type(value) for value in catalog.load("table")["ids"]] == [np.ndarray] * 2
        assert catalog.load("numbers") == {"pair": [1, 2]}


def test_a_reader_that_changes_its_input_changes_no_one_elses(tmp_path):
    catalog = catalog_of_a_run(tmp_path)
    catalog.save("numbers", {"a": [1]})
    catalog.load("numbers")["a"].append(2)
    catalog.save("table", pd.DataFrame({"x": [1]}))
    frame = catalog.load("table")
    frame.loc[0, "x"] = 5
    assert catalog.load("numbers") == {"a": [1]}
    assert list(catalog.load("table")["x"]) == [1]


def test_a_run_that_wrote_nothing_reads_the_file(tmp_path):
    DataCatalog.from_config(entries(tmp_path)).save("numbers", {"of": "an earlier run"})
    catalog = catalog_of_a_run(tmp_path)
    assert catalog.exists("numbers")
    assert not catalog.exists("table")
    assert catalog.load("numbers") == {"of": "an earlier run"}


def test_release_lets_go_of_the_copy(tmp_path):
    mine = catalog_of_a_run(tmp_path)
    mine.save("numbers", {"of": "mine"})
    (tmp_path / "numbers.json").write_text('{"of": "other"}')
    mine.release("numbers")
    assert mine.load("numbers") == {"of": "other"}


def test_only_what_the_run_reads_is_kept_in_memory(tmp_path, monkeypatch):
    catalog = catalog_of_a_run(tmp_path)
    monkeypatch.setattr(type(catalog["report"].wrapped), "_logging_activated", False)
    catalog.save("report", "<html>")
    (tmp_path / "report.html").write_text("another run's")
    assert catalog.load("report") == "another run's"


def test_a_copy_is_taken_only_of_what_has_the_fingerprint(tmp_path):
    earlier = catalog_of_a_run(tmp_path)
    earlier.save("numbers", {"a": 1})
    fingerprint = earlier["numbers"].fingerprint
    mine = catalog_of_a_run(tmp_path)
    assert mine["numbers"].take(fingerprint)
    (tmp_path / "numbers.json").write_text('{"a": 2}')
    assert mine.load("numbers") == {"a": 1}
    late = catalog_of_a_run(tmp_path)
    assert not late["numbers"].take(fingerprint)
    assert late.load("numbers") == {"a": 2}
    (tmp_path / "numbers.json").unlink()
    assert not catalog_of_a_run(tmp_path)["numbers"].take(fingerprint)


def test_what_others_look_at_in_a_dataset_is_still_there(tmp_path, caplog):
    plain, catalog = DataCatalog.from_config(entries(tmp_path)), catalog_of_a_run(tmp_path)
    assert "Replacing dataset" not in caplog.text
    for name in ("table", "numbers", "report"):
        dataset = catalog[name]
        assert isinstance(dataset, OwnCopy)
        assert type(dataset).__name__ == type(plain[name]).__name__  # what logs print and hooks ask for
        assert str(dataset) == str(plain[name])
        assert dataset._describe() == plain[name]._describe()
        assert dataset._filepath == plain[name]._filepath
        assert not dataset._EPHEMERAL
    assert catalog["numbers"].metadata == {"layer": "x"}
    catalog.save("table", pd.DataFrame({"x": [1]}))
    assert catalog["table"].preview()["data"] == [[1]]
    tags = input_tags(Pipeline([Node(lambda table: 1, "table", "y", name="n")]), catalog)
    assert set(tags) == {"data.table.path", "data.table.fingerprint"}


def test_the_wrapper_goes_only_around_files_that_the_run_writes_and_only_once(tmp_path):
    catalog = catalog_of_a_run(tmp_path)
    once = catalog["numbers"]
    read_own_writes(catalog, PIPELINE)
    assert catalog["numbers"] is once
    assert not isinstance(catalog["raw"], OwnCopy)
    assert not isinstance(catalog["handed_on"], OwnCopy)


def test_versioned_remote_and_model_datasets_are_left_as_they_are(tmp_path):
    kinds = {
        "versioned": {"type": "json.JSONDataset", "filepath": f"{tmp_path}/v.json", "versioned": True},
        "remote": {"type": "json.JSONDataset", "filepath": "memory://somewhere/r.json"},
        "model": {"type": "ppo_rlhf.datasets.PretrainedModelDataset", "filepath": f"{tmp_path}/model"},
        "checkpoint": {"type": "ppo_rlhf.datasets.CheckpointDataset", "filepath": f"{tmp_path}/checkpoints"},
    }
    catalog = DataCatalog.from_config(kinds)
    read_own_writes(catalog, Pipeline([Node(lambda: (), None, list(kinds), name="make")]))
    assert not any(isinstance(catalog[name], OwnCopy) for name in kinds)


def test_a_save_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    catalog = catalog_of_a_run(tmp_path)
    catalog.save("numbers", {"a": 1})
    with pytest.raises(DatasetError, match="not JSON serializable"):
        catalog.save("numbers", {"a": [1] * 10_000, "b": object()})
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["numbers.json"]
    assert catalog.load("numbers") == {"a": 1}


def test_a_file_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real.json").write_text("{}")
    (tmp_path / "numbers.json").symlink_to(tmp_path / "elsewhere" / "real.json")
    catalog_of_a_run(tmp_path).save("numbers", {"a": 1})
    assert (tmp_path / "numbers.json").is_symlink()
    assert json.loads((tmp_path / "elsewhere" / "real.json").read_text()) == {"a": 1}


class FolderDataset(JSONDataset):
    """A dataset that writes a folder at its path, as some of kedro-datasets do."""

    def save(self, data: dict) -> None:
        folder = Path(self._get_save_path())
        folder.mkdir()
        for name, text in data.items():
            (folder / name).write_text(text)

    def load(self) -> dict:
        return {path.name: path.read_text() for path in Path(self._get_load_path()).iterdir()}


def test_a_dataset_that_writes_a_folder_is_replaced_as_a_whole(tmp_path):
    copy = OwnCopy(FolderDataset(filepath=str(tmp_path / "plots")), is_read=True)
    copy.save({"a": "1", "b": "2"})
    copy.save({"c": "3"})
    assert copy.load() == {"c": "3"}
    assert os.listdir(tmp_path / "plots") == ["c"]
    again = OwnCopy(FolderDataset(filepath=str(tmp_path / "plots")), is_read=True)
    assert again.take(copy.fingerprint)
    assert not again.take("another")


def test_the_artifact_in_mlflow_is_this_runs_under_its_own_name(tmp_path, monkeypatch):
    logged = []

    def log_artifact(path: str, artifact_path: str) -> None:
        (tmp_path / "report.html").write_text("another run's")
        logged.append((Path(path).name, Path(path).read_text(), artifact_path))

    monkeypatch.setattr(mlflow, "log_artifact", log_artifact)
    catalog = catalog_of_a_run(tmp_path)
    catalog.save("report", "mine")
    assert logged == [("report.html", "mine", "report")]
    assert (tmp_path / "report.html").read_text() == "mine"


class LoggedDataset(JSONDataset):
    """Saves, then reads its file again to log it, as kedro-mlflow's does."""

    def save(self, data: dict) -> None:
        JSONDataset.save.__wrapped__(self, data)
        time.sleep(0.002)
        assert json.loads(Path(self._get_save_path()).read_text()) == data, "logged what another process wrote"


def write_and_read(folder: Path, me: int, is_wrapped: bool, begin: Any) -> None:
    dataset = LoggedDataset(filepath=str(folder / "x.json"))
    begin.wait()
    for turn in range(50):
        mine = {"by": me, "turn": turn, "filling": [me] * (50_000 if (turn + me) % 2 else 1)}
        copy = OwnCopy(dataset, is_read=True) if is_wrapped else dataset
        copy.save(mine)
        assert copy.load() == mine, "read what another process wrote"


def two_writers(folder: Path, is_wrapped: bool) -> tuple[list[int | None], int, int]:
    """Let two processes write one file at once; return their exit codes, how often it was read, how often torn."""
    fork = multiprocessing.get_context("fork")  # spares each process the seconds of importing
    begin = fork.Event()
    writers = [fork.Process(target=write_and_read, args=(folder, me, is_wrapped, begin)) for me in (1, 2)]
    for writer in writers:
        writer.start()
    begin.set()
    read = torn = 0
    while any(writer.is_alive() for writer in writers):
        time.sleep(0.001)
        if (folder / "x.json").exists():
            read += 1
            try:
                json.loads((folder / "x.json").read_text())
            except ValueError:
                torn += 1
    for writer in writers:
        writer.join()
    return [writer.exitcode for writer in writers], read, torn


def test_two_processes_that_write_one_file_at_once_each_read_and_log_their_own_and_it_is_always_whole(tmp_path):
    codes, read, torn = two_writers(tmp_path, is_wrapped=True)
    assert codes == [0, 0]
    assert (read > 50, torn) == (True, 0)
    assert os.listdir(tmp_path) == ["x.json"]


def test_without_it_two_processes_do_disturb_each_other(tmp_path):
    """Shows that the test above can fail."""
    codes, _, torn = two_writers(tmp_path, is_wrapped=False)
    assert codes != [0, 0] or torn > 0
