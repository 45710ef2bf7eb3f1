"""A resumed run skips the stages before the loop whose outputs the same MLflow run has written."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from kedro.framework.hooks import hook_impl
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.datasets import PretrainedModelDataset, ResumeCheckpointDataset
from ppo_rlhf.datasets.run_catalog import RunCatalog
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runner import ITERATION_TAG, LoopRunner
from ppo_rlhf.runtime import processes
from tests.bare_state import bare_state
from tests.tiny_models import tiny_model, word_tokenizer

ALL = ["split", "train", "collect", "ppo.start", "ppo.optimise", "export"]


@dataclass
class Project:
    """A chain like the real one: data, a model with metrics, pairs that the loop reads, the loop, its report."""

    folder: Path
    fail: str = ""
    seed: int = 0
    limit: int = 3
    read: dict[str, Any] = field(default_factory=dict)

    def pipeline(self) -> Pipeline:
        def split(limit: int) -> list[int]:
            return [limit]

        def train(rows: list[int]) -> tuple[TrainedModel, list[int]]:
            return TrainedModel(tiny_model(seed=self.seed), word_tokenizer()), rows

        def collect(model: PretrainedHandle, rows: list[int]) -> list[int]:
            return rows * 2

        def start(model: PretrainedHandle, pairs: list[int]) -> TrainingState:
            self.read = {"model": model.source, "pairs": pairs}
            return bare_state(1)

        def optimise(state: TrainingState) -> TrainingState:
            state.progress.iteration += 1
            return state

        def export(state: TrainingState) -> int:
            return state.progress.iteration

        ppo = [
            Node(start, ["model", "pairs"], "training_state", name="start"),
            Node(optimise, "training_state", "next_training_state", name="optimise", tags=ITERATION_TAG),
        ]
        return Pipeline(
            [
                Node(split, "params:limit", "rows", name="split"),
                Node(train, "rows", ["model", "metrics"], name="train"),
                Node(collect, ["model", "rows"], "pairs", name="collect"),
                *Pipeline(ppo, namespace="ppo", prefix_datasets_with_namespace=False).nodes,
                Node(export, "next_training_state", "exported", name="export"),
            ]
        )

    def catalog(self, resume: str | None) -> DataCatalog:
        memory = {name: MemoryDataset(copy_mode="assign") for name in ("training_state", "next_training_state")}
        files = {name: JSONDataset(filepath=str(self.file(name))) for name in ("rows", "metrics", "pairs", "exported")}
        model = PretrainedModelDataset(str(self.folder / "model"))
        entry = ResumeCheckpointDataset(str(self.folder / "checkpoints"), resume)
        entry.resolve(None)
        return DataCatalog(
            {"params:limit": MemoryDataset(self.limit), "resume_checkpoint": entry, "model": model, **memory, **files}
        )

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def own_file(self, name: str) -> Path:
        return self.folder / "runs" / "run" / f"{name}.json"

    def run(self, resume: str | None = None, **options: Any) -> list[str]:
        """Run, and return the names of the nodes that ran."""
        ran: list[str] = []

        class Watcher:
            @hook_impl
            def before_node_run(_, node: Node) -> None:  # noqa: N805
                ran.append(node.name)
                if node.name == self.fail:
                    raise DataError(node.name)

        manager = _create_hook_manager()
        manager.register(Watcher())
        LoopRunner().run(self.pipeline(), self.catalog(resume), manager, **options)
        return ran

    def killed_in(self, node: str) -> None:
        self.fail = node
        with pytest.raises(DataError):
            self.run()
        self.fail = ""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id="run")))
    return Project(tmp_path)


def as_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id=name)))


def test_a_resumed_run_skips_the_stages_before_the_loop_and_any_other_run_does_everything(project):
    assert project.run() == ALL
    assert project.run("latest") == ["ppo.start", "ppo.optimise", "export"]
    assert project.read["pairs"] == [3, 3]
    assert project.run() == ALL


def test_a_run_that_was_killed_goes_on_with_the_stage_that_it_was_killed_in(project):
    project.killed_in("train")
    assert project.run("latest") == ALL[1:]
    project.killed_in("ppo.start")
    assert project.run("latest") == ALL[3:]


def test_a_run_goes_on_with_its_own_model_and_tables_whatever_another_one_has_written_since(project, monkeypatch):
    project.run()
    own = project.read
    as_run("other", monkeypatch)
    project.seed, project.limit = 1, 4
    project.run()
    assert (project.read["model"] != own["model"], project.read["pairs"]) == (True, [4, 4])
    assert json.loads(project.file("pairs").read_text()) == [4, 4]
    as_run("run", monkeypatch)
    assert project.run("latest") == ["ppo.start", "ppo.optimise", "export"]
    assert project.read == own == {"model": own["model"], "pairs": [3, 3]}
    assert json.loads(project.file("pairs").read_text()) == [3, 3]  # the newest finished run's


@pytest.mark.parametrize(
    ("spoil", "again"),
    [
        (lambda project: project.own_file("pairs").unlink(), "collect"),
        (lambda project: project.own_file("pairs").write_text("[3, "), "collect"),
        (lambda project: shutil.rmtree(project.read["model"]), "train"),
        (lambda project: (Path(project.read["model"]) / "config.json").write_text("{}"), "train"),
    ],
    ids=["table gone", "table cut off", "model gone", "model changed"],
)
def test_an_output_that_is_gone_or_not_whole_is_made_again(project, spoil, again):
    project.run()
    spoil(project)
    assert project.run("latest") == [again, "ppo.start", "ppo.optimise", "export"]


@pytest.mark.parametrize("content", ["{half", '{"rows": {"path": "rows.json"}}', "[]", '{"rows": 3}', '{"rows": {}}'])
def test_a_record_that_cannot_be_used_skips_nothing(project, content):
    project.run()
    (project.folder / "checkpoints/run/outputs.json").write_text(content)
    assert project.run("latest") == ALL


def test_the_record_moves_with_the_project_and_lies_beside_the_checkpoints(project, tmp_path_factory):
    project.run()
    noted = json.loads((project.folder / "checkpoints/run/outputs.json").read_text())
    assert set(noted) == {"rows", "model", "metrics", "pairs"}
    moved = tmp_path_factory.mktemp("moved") / "project"
    shutil.move(project.folder, moved)
    assert Project(moved).run("latest") == ALL[3:]


def test_only_the_main_process_writes_and_the_others_wait_and_read_its_file(tmp_path, monkeypatch):
    waited: list[bool] = []
    path = tmp_path / "rows.json"
    monkeypatch.setattr(processes, "wait_for_all", lambda: waited.append(path.exists()))
    entries = DataCatalog({"rows": JSONDataset(filepath=str(path)), "kept": MemoryDataset()})
    catalog = RunCatalog(entries, Pipeline([]))
    monkeypatch.setenv("RANK", "1")
    catalog.save("rows", [1])
    catalog.save("kept", [2])
    assert catalog.load("kept") == [2]
    monkeypatch.setenv("RANK", "0")
    catalog.save("rows", [3])
    monkeypatch.setenv("RANK", "1")
    assert catalog.load("rows") == [3]
    assert waited == [False, True]
