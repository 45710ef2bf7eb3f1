"""A toy chain with the real one's shape: data, a model, pairs, a second model, a loop; only the loop always runs."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline

from ppo_rlhf.datasets.own_copy import read_own_writes
from ppo_rlhf.models.loading import TrainedModel
from ppo_rlhf.runner import work_records
from ppo_rlhf.runner.finished import FinishedWork
from tests.tiny_models import tiny_model, word_tokenizer

ONCE = ["check", "split", "train", "collect", "train_reward"]
BUT_SPLIT = [name for name in ONCE if name != "split"]
LOOP = ["ppo.start", "ppo.iterate", "ppo.export", "report"]


@dataclass(frozen=True)
class Settings:
    seed: int = 0


@dataclass(frozen=True)
class PPO:
    temperature: float = 1.0
    total_episodes: int = 100


@dataclass
class Project:
    """A folder with inputs, and what a run of the chain gets from outside its files."""

    folder: Path
    training: Settings = field(default_factory=Settings)
    ppo: PPO = field(default_factory=PPO)
    pairs: dict[str, Any] = field(default_factory=lambda: {"pairs": 2, "labeller": "toy_labeller:label"})
    models_below: str = "data"
    draw: Callable[[], int] = lambda: 0
    """A seed that inputs do not decide, as on hardware that does not repeat itself."""

    def catalog(self) -> DataCatalog:
        table, model = "ppo_rlhf.datasets.TableDataset", "ppo_rlhf.datasets.PretrainedModelDataset"
        data = str(self.folder / "data")
        entries = {
            "raw": {"type": "ppo_rlhf.datasets.RecordsDataset", "filepath": f"{data}/raw.jsonl"},
            "raw_pairs": {"type": "ppo_rlhf.datasets.RecordsDataset", "filepath": None},
            "base_model": {"type": model, "filepath": None},
            "table": {"type": table, "filepath": f"{data}/table.parquet"},
            "policy": {"type": model, "filepath": f"{self.folder}/{self.models_below}/policy"},
            "metrics": {"type": "json.JSONDataset", "filepath": f"{data}/metrics.json"},
            "pairs": {"type": table, "filepath": f"{data}/pairs.parquet"},
            "reward": {"type": model, "filepath": f"{self.folder}/{self.models_below}/reward"},
            "exported": {"type": "json.JSONDataset", "filepath": f"{data}/exported.json"},
        }
        catalog = DataCatalog.from_config(entries)
        for name in ("training", "ppo"):
            catalog[f"params:{name}"] = getattr(self, name)
        catalog["params:collection"] = self.pairs
        for name in ("checked", "training_state", "next_training_state", "reported"):
            catalog.get(name, fallback_to_runtime_pattern=True)
        return catalog

    def pipeline(self) -> Pipeline:
        def train(seed: int) -> TrainedModel:
            return TrainedModel(tiny_model(seed=seed + self.draw()), word_tokenizer())

        def logits(handle: Any) -> float:
            return handle.causal_lm()(torch.tensor([[4, 5, 6]])).logits.sum().item()

        once = [
            Node(lambda raw: raw.iloc[1:], "raw", "table", name="split"),
            Node(
                lambda base, table, training: (train(training.seed + len(table)), {"loss": training.seed}),
                ["base_model", "table", "params:training"],
                ["policy", "metrics"],
                name="train",
            ),
            Node(lambda raw_pairs: pd.DataFrame(), "raw_pairs", "checked", name="check"),
            Node(
                lambda checked, policy, ppo, collection: pd.DataFrame(
                    {"text": [f"{logits(policy) + ppo.temperature:.9f}"] * collection["pairs"]}
                ),
                ["checked", "policy", "params:ppo", "params:collection"],
                "pairs",
                name="collect",
            ),
            Node(lambda policy, pairs: train(7 + len(pairs)), ["policy", "pairs"], "reward", name="train_reward"),
        ]
        loop = [
            Node(
                lambda *models: [logits(model) for model in models],
                ["policy", "reward"],
                "training_state",
                name="start",
            ),
            Node(lambda state: state, "training_state", "next_training_state", name="iterate", tags="iteration"),
            Node(lambda state: state, "next_training_state", "exported", name="export"),
        ]
        after = [Node(lambda exported: "done", "exported", "reported", name="report")]
        namespaced = Pipeline(loop, namespace="ppo", prefix_datasets_with_namespace=False)
        return Pipeline(once) + namespaced + Pipeline(after)

    def run(self, resume: bool = False, until: str | None = None, pipeline: Pipeline | None = None) -> list[str]:
        """Run as the LoopRunner does, `until` a node is reached; return the names of the nodes that ran."""
        pipeline = pipeline or self.pipeline()
        catalog = self.catalog()
        read_own_writes(catalog, pipeline)
        work = FinishedWork(self.folder / "finished", pipeline, catalog)
        ran = []
        for node in (work.remaining() if resume else pipeline).nodes:
            if node.name == until:
                break
            outputs = node.run({name: catalog.load(name) for name in node.inputs})
            for name, data in outputs.items():
                catalog.save(name, data)
            work.record(node)
            ran.append(node.name)
        self.last_catalog = catalog
        return ran

    def models(self, name: str) -> list[Path]:
        return sorted((self.folder / "data" / name).iterdir())

    def records(self) -> list[Path]:
        return sorted((self.folder / "finished").iterdir())

    def exported(self) -> Any:
        return json.loads((self.folder / "data" / "exported.json").read_text())


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "raw.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    (tmp_path / "toy_labeller.py").write_text("def label(prompts, completions): return [0.0]\n")
    return Project(tmp_path)


@pytest.fixture
def as_run(monkeypatch):
    """Let what follows be another MLflow run."""

    def become(run_id: str) -> None:
        monkeypatch.setattr(work_records, "run_directory", lambda root: root / run_id)

    return become


def damage(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def test_a_resumed_run_does_only_the_loop_and_what_follows_it(project, caplog):
    caplog.set_level(logging.INFO)
    assert project.run() == ONCE + LOOP
    assert not [line for line in caplog.messages if line.startswith("Not done again")]
    before = project.exported()
    assert project.run(resume=True) == LOOP
    assert project.exported() == before
    policy, reward = project.models("policy")[0], project.models("reward")[0]
    assert [line for line in caplog.messages if line.startswith("Not done again")] == [
        "Not done again: check (only finished work reads what it makes)",
        "Not done again: split (only finished work reads what it makes)",
        f"Not done again: train (finished before with the same inputs, {policy.relative_to(project.folder)})",
        "Not done again: collect (only finished work reads what it makes)",
        f"Not done again: train_reward (finished before with the same inputs, {reward.relative_to(project.folder)})",
    ]


def test_a_run_that_does_not_resume_does_everything(project):
    project.run()
    assert project.run() == ONCE + LOOP


CHANGES: dict[str, tuple[Callable[[Project], Any], list[str]]] = {
    "a parameter of the first model": (lambda p: setattr(p, "training", Settings(seed=5)), BUT_SPLIT),
    "the data": (lambda p: (p.folder / "data/raw.jsonl").write_text('{"text": "d"}\n{"text": "e"}\n'), ONCE),
    "a parameter of the pairs": (lambda p: p.pairs.update(pairs=3), ["check", "collect", "train_reward"]),
    "a setting of PPO's": (lambda p: setattr(p, "ppo", PPO(temperature=0.5)), ["check", "collect", "train_reward"]),
    "the labeller's file": (
        lambda p: (p.folder / "toy_labeller.py").write_text("def label(prompts, completions): return [1.0]\n"),
        ["check", "collect", "train_reward"],
    ),
    "how long PPO trains": (lambda p: setattr(p, "ppo", PPO(total_episodes=200)), []),
    "nothing but the data's time": (lambda p: (p.folder / "data/raw.jsonl").touch(), []),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_repeats_what_depends_on_it_and_nothing_else(project, change):
    apply, expected = CHANGES[change]
    project.run()
    apply(project)
    assert sorted(project.run(resume=True)) == sorted(expected + LOOP)


def test_another_version_of_a_library_repeats_nothing(project, monkeypatch):
    project.run()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    assert project.run(resume=True) == LOOP


@pytest.mark.parametrize("spoil", [damage, shutil.rmtree, lambda model: (model / "config.json").unlink()])
def test_a_model_that_is_not_what_was_written_is_made_again_with_all_that_was_made_from_it(project, spoil):
    project.run()
    spoil(project.models("policy")[0])
    assert project.run(resume=True) == BUT_SPLIT + LOOP


def test_a_model_that_nothing_is_made_from_is_made_again_alone(project):
    project.run()
    damage(project.models("reward")[0])
    assert project.run(resume=True) == ["train_reward", *LOOP]


def test_a_table_that_is_gone_is_made_again_if_something_needs_it(project):
    project.run()
    (project.folder / "data/pairs.parquet").unlink()
    assert project.run(resume=True) == LOOP
    damage(project.models("reward")[0])
    assert project.run(resume=True) == ["check", "collect", "train_reward", *LOOP]


@pytest.mark.parametrize(("reached", "expected"), [("train", BUT_SPLIT), ("train_reward", ["train_reward"])])
def test_a_run_that_was_killed_goes_on_with_the_stage_that_it_was_killed_in(project, reached, expected):
    project.run(until=reached)
    assert project.run(resume=True) == expected + LOOP


def test_outputs_that_no_record_tells_of_count_for_nothing(project):
    project.run()
    for record in project.records():
        record.unlink()
    assert project.run(resume=True) == ONCE + LOOP


def test_what_another_run_wrote_since_changes_nothing(project, as_run):
    as_run("a")
    project.run()
    exported = project.exported()
    as_run("b")
    other = replace(project, training=Settings(seed=5), pairs={"pairs": 4})
    other.run()
    assert project.exported() != exported
    as_run("a")
    assert project.run(resume=True) == LOOP
    assert project.exported() == exported
    assert project.last_catalog.load("policy").source == str(project.models("policy")[0])


def test_a_table_is_read_as_it_was_recorded_though_it_is_overwritten_later(project):
    """As the evaluation of the SFT policy: made before the loop, read after it, hours later."""
    evaluation = Pipeline(
        [
            Node(lambda raw: raw.iloc[::-1], "raw", "table", name="evaluate"),
            Node(lambda raw: 1, "raw", "next_training_state", name="iterate", tags="iteration"),
            Node(lambda table, _: table, ["table", "next_training_state"], "reported", name="compare"),
        ]
    )
    project.run(pipeline=evaluation)
    catalog = project.catalog()
    read_own_writes(catalog, evaluation)
    remaining = FinishedWork(project.folder / "finished", evaluation, catalog).remaining()
    assert {node.name for node in remaining.nodes} == {"iterate", "compare"}
    project.catalog().save("table", pd.DataFrame({"text": ["another run's"]}))
    assert list(catalog.load("table")["text"]) == ["c", "b", "a"]


def test_an_input_that_changes_while_its_node_runs_is_not_recorded(project, caplog):
    caplog.set_level(logging.INFO)
    pipeline = project.pipeline()
    catalog = project.catalog()
    read_own_writes(catalog, pipeline)
    work = FinishedWork(project.folder / "finished", pipeline, catalog)
    split = next(node for node in pipeline.nodes if node.name == "split")
    table = split.run({"raw": catalog.load("raw")})["table"]
    (project.folder / "data/raw.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    catalog.save("table", table)
    work.record(split)
    assert "split: an input changed while it ran, so a resumed run will do it again." in caplog.messages
    assert not (project.folder / "finished").exists()


def test_a_stage_run_alone_is_done_again_only_if_what_it_is_run_for_is_gone(project):
    alone = Pipeline([node for node in project.pipeline().nodes if node.name in ("split", "train")])
    assert project.run(pipeline=alone) == ["split", "train"]
    assert project.run(pipeline=alone, resume=True) == []
    (project.folder / "data/table.parquet").unlink()
    assert project.run(pipeline=alone, resume=True) == []
    (project.folder / "data/metrics.json").unlink()
    assert project.run(pipeline=alone, resume=True) == ["split", "train"]


def test_each_of_two_runs_that_made_different_models_of_the_same_inputs_gets_its_own_back(project, as_run):
    """Sums on a GPU have no fixed order, so equal inputs need not give equal models."""
    exported = {}
    for run, seed in (("a", 100), ("b", 200)):
        as_run(run)
        project.draw = lambda seed=seed: seed
        project.run()
        exported[run] = project.exported()
    assert exported["a"] != exported["b"]
    for run in ("a", "b"):
        as_run(run)
        assert project.run(resume=True) == LOOP
        assert project.exported() == exported[run]


def test_a_model_made_from_another_runs_model_is_not_taken(project, as_run):
    as_run("a")
    project.draw = lambda: 100
    project.run()
    as_run("b")
    project.draw = lambda: 200
    project.run(until="collect")
    assert sorted(project.run(resume=True)) == sorted(["check", "collect", "train_reward", *LOOP])


def test_a_model_made_from_an_equal_model_is_taken_from_another_run(project, as_run):
    as_run("a")
    project.run()
    as_run("b")
    project.run(until="collect")
    assert project.run(resume=True) == LOOP


def test_records_of_what_is_gone_are_deleted(project, as_run):
    for run, seed in (("a", 1), ("b", 2), ("c", 3)):
        as_run(run)
        project.training = Settings(seed=seed)
        project.run()
    names = [record.name.rsplit("-", 2)[0] for record in project.records()]
    assert sorted(names) == ["collect", "split", *["train"] * 3, *["train_reward"] * 3]
    for model in [*project.models("policy")[:2], *project.models("reward")[:2]]:
        shutil.rmtree(model)
    (project.folder / "data/metrics.json").unlink()
    project.run()
    names = [record.name.rsplit("-", 2)[0] for record in project.records()]
    assert sorted(names) == ["collect", "split", "train", "train_reward"]


def test_a_damaged_record_is_named_and_left_out(project, caplog):
    project.run()
    record = next(record for record in project.records() if record.name.startswith("train-"))
    record.write_text(record.read_text()[:40])
    assert project.run(resume=True) == BUT_SPLIT + LOOP
    assert any(str(record) in line and "cannot be read and is left out" in line for line in caplog.messages)


def test_a_record_that_cannot_be_written_costs_a_warning_and_not_the_run(project, caplog):
    (project.folder / "finished").write_text("a file where the folder should be")
    assert project.run() == ONCE + LOOP
    assert any(line.startswith("train: that it is finished could not be noted: ") for line in caplog.messages)


def test_finished_work_moves_with_the_project(project, tmp_path_factory, monkeypatch):
    project.run()
    moved = tmp_path_factory.mktemp("elsewhere") / "project"
    shutil.move(project.folder, moved)
    monkeypatch.chdir(moved)
    there = replace(project, folder=moved)
    assert there.run(resume=True) == LOOP
    assert there.last_catalog.load("policy").source == str(there.models("policy")[0])


def test_a_model_that_lies_where_the_catalog_no_longer_looks_is_made_again(project):
    project.run()
    project.models_below = "elsewhere"
    assert project.run(resume=True) == BUT_SPLIT + LOOP


def test_records_are_small_and_nothing_else_lies_beside_them(project):
    project.run()
    assert [record.suffix for record in project.records()] == [".json"] * 4
    assert max(record.stat().st_size for record in project.records()) < 2000
