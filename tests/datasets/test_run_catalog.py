"""Runs that write the same catalog entries at the same time: each run reads its own data."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pandas as pd
import pytest
from kedro.framework.hooks import hook_impl
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import AbstractDataset, DataCatalog, DatasetError
from kedro.pipeline import Node, Pipeline
from pandas.testing import assert_frame_equal

from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.datasets.run_catalog import RunCatalog
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.runner import LoopRunner
from ppo_rlhf.runtime import processes
from tests.tiny_models import tiny_model, word_tokenizer


class FolderDataset(AbstractDataset[str, str]):
    """A catalog entry that is a folder, as in some of Kedro's plugins."""

    def __init__(self, filepath: str) -> None:
        self._filepath = Path(filepath)

    def save(self, data: str) -> None:
        self._filepath.mkdir(parents=True, exist_ok=True)
        (self._filepath / "part").write_text(data)

    def load(self) -> str:
        return (self._filepath / "part").read_text()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}


def entry(kind: str, filepath: str, **options: Any) -> dict[str, Any]:
    return {"type": kind, "filepath": filepath, **options}


def logged(dataset: dict[str, Any]) -> dict[str, Any]:
    return {"type": "kedro_mlflow.io.artifacts.MlflowArtifactDataset", "dataset": dataset, "artifact_path": "report"}


ENTRIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "json": lambda root: entry("json.JSONDataset", f"{root}/x.json"),
    "csv": lambda root: entry("pandas.CSVDataset", f"{root}/x.csv", save_args={"index": False}),
    "parquet": lambda root: entry("ppo_rlhf.datasets.TableDataset", f"{root}/x.parquet"),
    "text": lambda root: entry("text.TextDataset", f"{root}/x.txt"),
    "versions": lambda root: entry("json.JSONDataset", f"{root}/x.json", versioned=True),
    "folder": lambda root: {"type": FolderDataset, "filepath": f"{root}/x"},
    "in MLflow": lambda root: logged(entry("json.JSONDataset", f"{root}/x.json")),
    "csv in MLflow": lambda root: logged(entry("pandas.CSVDataset", f"{root}/x.csv", save_args={"index": False})),
    "card in MLflow": lambda root: logged(
        entry("ppo_rlhf.datasets.ModelCardDataset", f"{root}/x.md", path=f"{root}/policies")
    ),
}


def content(kind: str, run: str) -> Any:
    """A fake of the dataset that the run writes."""
    if kind in ("csv", "csv in MLflow", "parquet"):
        return pd.DataFrame({"by": [run]})
    return (None, run) if kind == "card in MLflow" else run


def in_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id=name)))


def run(
    made: Any, entries: dict[str, Any], *, between: Callable[[], object] = lambda: None, fail: bool = False
) -> tuple[Any, DataCatalog]:
    """Run two nodes: the first writes `x`, the second reads `x`; call `between` before the second node."""
    read: list[Any] = []

    def take(x: Any) -> int:
        read.append(x)
        if fail:
            raise ZeroDivisionError
        return 1

    class Between:
        @hook_impl
        def before_dataset_loaded(self, dataset_name: str) -> None:
            if dataset_name == "x":
                between()

    manager = _create_hook_manager()
    manager.register(Between())
    catalog = DataCatalog.from_config({"x": entries})
    nodes = [Node(lambda: made, None, "x", name="make"), Node(take, "x", "y", name="take")]
    LoopRunner().run(Pipeline(nodes), catalog, manager)
    return read[0], catalog


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_run_reads_and_logs_its_own_though_another_one_wrote_in_between(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    artifacts: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        mlflow, "log_artifact", lambda path, _: artifacts.append((Path(path).name, Path(path).read_bytes()))
    )
    entries = ENTRIES[kind](str(tmp_path))

    def other() -> None:
        in_run("other", monkeypatch)
        run(content(kind, "other"), entries)
        in_run("run", monkeypatch)

    in_run("run", monkeypatch)
    read, catalog = run(content(kind, "run"), entries, between=other)
    for found in (read, catalog["x"].load()):  # also after the end of the run, because this run ended last
        if isinstance(found, pd.DataFrame):
            assert_frame_equal(found, content(kind, "run"))
        else:
            assert found == "run"
    assert [name for name, _ in artifacts] == (["x" + catalog["x"]._filepath.suffix] * 2 if "MLflow" in kind else [])
    assert [b"run" in text for _, text in artifacts] == ([True, False] if artifacts else [])


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_of_a_run_that_ended_well_only_reports_outside_mlflow_stay_in_a_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("first", "second"):
        in_run(name, monkeypatch)
        for layer in ("07_model_output", "08_reporting"):
            run(name, ENTRIES["text"](f"{tmp_path}/{layer}"))
    assert files(tmp_path) == {
        "07_model_output/x.txt": "second",
        "08_reporting/x.txt": "second",
        "08_reporting/runs/first/x.txt": "first",
        "08_reporting/runs/second/x.txt": "second",
    }
    assert list(tmp_path.glob("07_model_output/runs/*")) == []


@pytest.mark.parametrize("is_tracked", [True, False])
def test_a_report_has_one_copy_a_run_in_mlflow_or_else_in_a_place_of_its_own(
    is_tracked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copies: list[str] = []
    monkeypatch.setattr(mlflow, "log_artifact", lambda path, _: copies.append(Path(path).read_text()))
    in_run("run", monkeypatch)
    catalog = DataCatalog.from_config({"x": logged(ENTRIES["text"](f"{tmp_path}/08_reporting"))})
    catalog["x"]._logging_activated = is_tracked  # as kedro-mlflow does where tracking is disabled
    LoopRunner().run(Pipeline([Node(lambda: "made", None, "x", name="make")]), catalog)
    assert copies == (["made"] if is_tracked else [])
    own = {} if is_tracked else {"08_reporting/runs/run/x.txt": "made"}
    assert files(tmp_path) == {"08_reporting/x.txt": "made", **own}
    assert catalog["x"].load() == "made"


def test_what_a_run_that_failed_has_written_stays_and_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_run("failed", monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run("whole", ENTRIES["text"](str(tmp_path)), fail=True)
    assert files(tmp_path) == {"x.txt": "whole", "runs/failed/x.txt": "whole"}


class HalfDataset(AbstractDataset[str, str]):
    """Writes half of the data and then fails like a full disk."""

    def __init__(self, filepath: str) -> None:
        self._filepath = Path(filepath)

    def save(self, data: str) -> None:
        self._filepath.parent.mkdir(parents=True, exist_ok=True)
        self._filepath.write_text(data[:2])
        raise OSError(28, "No space left on device")

    def load(self) -> str:
        return self._filepath.read_text()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}


def test_a_file_written_half_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_run("failed", monkeypatch)
    (tmp_path / "x").write_text("of another run")
    with pytest.raises(DatasetError, match="No space left"):
        run("whole", {"type": HalfDataset, "filepath": str(tmp_path / "x")})
    assert files(tmp_path) == {"x": "of another run", "runs/failed/x": "wh"}


def test_a_file_that_cannot_be_published_ends_the_run_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_run("run", monkeypatch)
    (tmp_path / "x.txt" / "a folder where the file would be").mkdir(parents=True)
    with pytest.raises(DatasetError, match=r"^x cannot ") as caught:
        run("whole", ENTRIES["text"](str(tmp_path)))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("full_at", [1, 2])
def test_a_report_that_cannot_be_published_fails_no_run_and_is_named_with_its_own_place(
    full_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    copy, copies = shutil.copyfile, []

    def copy_until_full(source: Path, target: Path) -> None:
        copies.append(target)
        if len(copies) >= full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_until_full)
    monkeypatch.setattr(mlflow, "log_artifact", lambda path, _: None)
    in_run("run", monkeypatch)
    read, _ = run("mine", logged(ENTRIES["text"](f"{tmp_path}/08_reporting")))
    assert read == "mine"
    assert len(copies) == 2
    own = tmp_path / "08_reporting" / "runs" / "run" / "x.txt"
    assert own.read_text() == "mine"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(f"x cannot be copied .*: {re.escape('[Errno 28] No space left on device')}.* {own}", warning)


def test_a_catalog_that_is_used_twice_has_the_usual_places_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    catalog = DataCatalog.from_config({"x": ENTRIES["text"](f"{tmp_path}/08_reporting")})
    pipeline = Pipeline([Node(lambda: "made", None, "x", name="make")])
    for name in ("first", "second"):
        in_run(name, monkeypatch)
        LoopRunner().run(pipeline, catalog)
    places = {"08_reporting/x.txt", "08_reporting/runs/first/x.txt", "08_reporting/runs/second/x.txt"}
    assert set(files(tmp_path)) == places


def trained(seed: int) -> TrainedModel:
    return TrainedModel(tiny_model(seed=seed), word_tokenizer())


def test_a_model_that_a_run_only_reads_is_the_same_one_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another run may write a newer version while this run trains from the older version."""
    in_run("run", monkeypatch)
    model = PretrainedModelDataset(str(tmp_path / "sft"))
    model.save(trained(0))
    seen: list[str] = []

    def train(sft: Any) -> int:
        seen.append(sft.source)
        PretrainedModelDataset(str(tmp_path / "sft")).save(trained(1))
        return 1

    nodes = [
        Node(train, "sft", "trained", name="train"),
        Node(lambda sft, trained: seen.append(sft.source), ["sft", "trained"], None, name="evaluate"),
    ]
    catalog = DataCatalog({"sft": PretrainedModelDataset(str(tmp_path / "sft"))})
    LoopRunner().run(Pipeline(nodes), catalog)
    assert seen == [str(model.pinned)] * 2
    later = DataCatalog({"sft": PretrainedModelDataset(str(tmp_path / "sft"))})
    assert later["sft"].load().source != seen[0]


@pytest.mark.parametrize("is_written", [True, False])
def test_the_other_processes_read_the_main_ones_version(
    is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other processes look up the version only after another run has written a newer version."""
    main = PretrainedModelDataset(str(tmp_path / "policy"))
    main.save(trained(0))
    PretrainedModelDataset(str(tmp_path / "policy")).save(trained(1))
    told = [({}, {} if is_written else {"policy": str(main.pinned)}), main.pinned]
    monkeypatch.setattr(processes, "from_main", lambda value: told.pop(0))
    monkeypatch.setattr(processes, "wait_for_all", lambda: None)
    monkeypatch.setenv("RANK", "1")
    catalog = DataCatalog({"policy": PretrainedModelDataset(str(tmp_path / "policy"))})
    nodes = [Node(lambda: None, None, "policy", name="export")] if is_written else []
    reader = Node(lambda policy: None, "policy", None, name="evaluate")
    follower = RunCatalog(catalog, Pipeline([*nodes, reader]))
    if is_written:
        follower.save("policy", trained(0))
    assert follower.load("policy").source == str(main.pinned)


def test_the_other_processes_read_the_main_ones_file_and_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pipeline = Pipeline([Node(lambda: 1, None, "x", name="make")])

    def catalog() -> RunCatalog:
        return RunCatalog(DataCatalog.from_config({"x": ENTRIES["json"](str(tmp_path))}), pipeline)

    in_run("run", monkeypatch)
    main = catalog()
    main.save("x", [1])
    (tmp_path / "x.json").write_text("[2]")  # written by another run
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PPO_RLHF_RUN_ID", "run")
    follower = catalog()
    follower.save("x", [3])
    assert follower.load("x") == [1]
    assert {name: json.loads(text) for name, text in files(tmp_path).items()} == {"x.json": [2], "runs/run/x.json": [1]}
    follower.finish()
    assert follower.load("x") == [2]
    assert main.load("x") == [1]  # the main process deletes it
