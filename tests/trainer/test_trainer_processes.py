"""Several processes share the work of one batch, so every process must give PPOTrainer the same arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.checkpoints.files import checkpoint_iterations
from tests.launch import launch
from tests.trainer.test_callbacks import scalars
from tests.trainer.trainer_process_case import REFUSED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainer")
    launch("tests.trainer.trainer_process_case", str(folder / "results.json"), processes=2, folder=folder)
    actual: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return actual


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_differ_between_the_processes_are_refused_in_each_by_name(by_rank, name):
    call, what = name.split(": ")
    for actual in by_rank:
        assert actual[name].startswith(f"{call}: the processes give different ")
        assert what in actual[name].partition(".")[0]
        assert "ppo_rlhf.runtime.processes.from_main(value)" in actual[name]
        assert "\n" not in actual[name]


def test_a_length_that_is_drawn_is_the_main_processs_and_the_first_kl_is_zero(by_rank):
    assert [actual["lengths"] for actual in by_rank] == [2, 2]
    assert [actual["first KL"] for actual in by_rank] == [pytest.approx(0.0, abs=1e-6)] * 2


def test_a_reward_function_is_called_on_the_main_process(by_rank):
    assert [actual["scores"] for actual in by_rank] == [[0.0] * 3] * 2


def test_callbacks_and_limits_act_in_both_processes_alike(tmp_path: Path):
    launch("tests.trainer.callbacks_process_case", str(tmp_path), processes=2, folder=tmp_path)
    actual = json.loads((tmp_path / "results.json").read_text())
    for mode, end, iteration in (
        ("plain", "finished", 3),
        ("stops", "finished", 2),
        ("fails", "TrainingError: The callback Watching.on_step_end raised ValueError: only here", 2),
        ("time", "RunInterruptedError: The run was stopped by ppo.max_time=1e-09 hours.", 1),
    ):
        first, second = actual[mode]
        assert first == second, mode
        assert (first["end"], first["iteration"]) == (end, iteration)
        assert checkpoint_iterations(tmp_path / mode) == [iteration]
    points = scalars(tmp_path / "plain" / "tensorboard")
    assert list(points["train/objective/kl"]) == [1, 2, 3]  # once, though two processes train
    assert list(points["eval/reward"].values()) == pytest.approx(actual["plain"][0]["rewards"])
