"""On several processes PPOTrainer shares the work of one batch, so every process must give it the same arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.trainer_process_case import REFUSED

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainer")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launch, "-m", "tests.training.trainer_process_case", str(folder / "results.json")]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_differ_between_the_processes_are_refused_in_each_by_name(by_rank, name):
    call, what = name.split(": ")
    for found in by_rank:
        assert found[name].startswith(f"{call}: the processes give different ")
        assert what in found[name].partition(".")[0]
        assert "Each gives the same arguments, and the trainer shares the work" in found[name]
        assert "\n" not in found[name]


def test_a_length_that_is_drawn_is_the_main_processs_and_the_first_kl_is_zero(by_rank):
    assert [found["lengths"] for found in by_rank] == [2, 2]
    assert [found["first KL"] for found in by_rank] == [pytest.approx(0.0, abs=1e-6)] * 2


def test_a_reward_function_is_called_on_the_main_process(by_rank):
    assert [found["scores"] for found in by_rank] == [[0.0] * 3] * 2
