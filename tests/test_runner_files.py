"""What LoopRunner does about files: finished work is not done again, and a run reads what it wrote itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline
from kedro_datasets.json import JSONDataset

from ppo_rlhf.datasets import ResumeCheckpointDataset
from ppo_rlhf.runner import ITERATION_TAG, LoopRunner


class State:
    """Two iterations."""

    total_iterations, stopping, shutdown_grace_s = 2, False, 25.0

    def __init__(self) -> None:
        self.iteration = 0

    @property
    def finished(self) -> bool:
        return self.iteration >= self.total_iterations


def prepare(limit: int) -> dict[str, int]:
    return {"limit": limit}


def initialise(prepared: dict[str, int]) -> State:
    return State()


def optimise(state: State) -> State:
    state.iteration += 1
    return state


def export(state: State, prepared: dict[str, int]) -> dict[str, int]:
    return {"iterations": state.iteration, **prepared}


STAGES = Pipeline(
    [
        Node(prepare, "params:limit", "prepared", name="prepare"),
        Node(initialise, "prepared", "training_state", name="initialise"),
        Node(optimise, "training_state", "next_training_state", name="optimise", tags=ITERATION_TAG),
        Node(export, ["next_training_state", "prepared"], "exported", name="export"),
    ]
)


def done_in(
    folder: Path, caplog: pytest.LogCaptureFixture, resume: str | None, pipeline: Pipeline = STAGES
) -> set[str]:
    """Run, and return the nodes that ran once."""
    entry = ResumeCheckpointDataset(str(folder / "ppo_checkpoints"), resume)
    memory = {name: MemoryDataset(copy_mode="assign") for name in ("training_state", "next_training_state")}
    files = {name: JSONDataset(filepath=str(folder / f"{name}.json")) for name in ("prepared", "exported")}
    catalog = DataCatalog({"params:limit": MemoryDataset(3), "resume_checkpoint": entry, **memory, **files})
    caplog.clear()
    with caplog.at_level(logging.INFO):
        LoopRunner().run(pipeline, catalog)
    return {m.split(": ")[1].split(" (")[0] for m in caplog.messages if m.startswith("Completed node")}


def test_a_resumed_run_does_not_do_finished_work_again_and_any_other_run_does(tmp_path, caplog):
    everything = {"prepare", "initialise", "export"}
    assert done_in(tmp_path, caplog, resume=None) == everything
    assert done_in(tmp_path, caplog, resume="latest") == everything - {"prepare"}
    assert any(message.startswith("Not done again: prepare") for message in caplog.messages)
    assert json.loads((tmp_path / "exported.json").read_text()) == {"iterations": 2, "limit": 3}
    assert done_in(tmp_path, caplog, resume=None) == everything
    assert list(tmp_path.glob("finished_work/prepare*.json"))


def test_what_a_run_without_the_loop_finished_is_not_done_again_by_one_with_it(tmp_path, caplog):
    assert done_in(tmp_path, caplog, resume=None, pipeline=STAGES.filter(node_names=["prepare"])) == {"prepare"}
    assert "prepare" not in done_in(tmp_path, caplog, resume="latest")


def test_a_run_that_has_nothing_left_to_do_ends_well(tmp_path, caplog):
    prepare_only = STAGES.filter(node_names=["prepare"])
    done_in(tmp_path, caplog, resume=None, pipeline=prepare_only)
    assert done_in(tmp_path, caplog, resume="latest", pipeline=prepare_only) == set()


def test_without_the_entry_for_resuming_nothing_is_recorded(tmp_path):
    pipeline = STAGES.filter(node_names=["prepare"])
    catalog = {"params:limit": MemoryDataset(3), "prepared": JSONDataset(filepath=str(tmp_path / "prepared.json"))}
    LoopRunner().run(pipeline, DataCatalog(catalog))
    assert [path.name for path in tmp_path.iterdir()] == ["prepared.json"]


def test_a_node_reads_what_this_run_wrote_though_another_run_wrote_the_same_file_since(tmp_path):
    file = tmp_path / "prepared.json"

    def other_run(prepared: dict[str, int]) -> int:
        file.write_text('{"limit": 99}')
        return 0

    pipeline = Pipeline(
        [
            Node(prepare, "params:limit", "prepared", name="prepare"),
            Node(other_run, "prepared", "interrupted", name="other_run"),
            Node(lambda prepared, _: prepared, ["prepared", "interrupted"], "seen", name="read"),
        ]
    )
    memory = {name: MemoryDataset() for name in ("interrupted", "seen")}
    catalog = DataCatalog({"params:limit": MemoryDataset(3), "prepared": JSONDataset(filepath=str(file)), **memory})
    assert LoopRunner().run(pipeline, catalog)["seen"].load() == {"limit": 3}
