"""The whole stage of PPO on two processes that share all weights, by accelerate's file, as one process runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.integration.outcomes import OF_THE_CLOCK, Run

HISTORY = "data/test/07_model_output/training_history/training_history.csv"
LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "conf/accelerate/fsdp2.yaml"),
    *("-m", "kedro", "run", "--env", "test", "--pipelines", "align"),
]


@pytest.mark.slow
def test_ppo_with_fsdp2_on_two_processes_has_the_history_of_one_process(chain: Run, tmp_path: Path) -> None:
    project = shutil.copytree(chain.project, tmp_path / "project")
    shutil.rmtree(project / "data/test/08_reporting")
    finished = subprocess.run(
        [*LAUNCH, "--params", "ppo.per_device_train_batch_size=4"],
        cwd=project,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    assert "FSDP2-wrapped" not in output, output  # no warning of views, which the log would repeat
    found, expected = (pd.read_csv(each / HISTORY) for each in (project, chain.project))
    assert list(found) == list(expected)
    compared = [name for name in expected if not OF_THE_CLOCK.fullmatch(name)]
    assert found[compared].to_numpy() == pytest.approx(expected[compared].to_numpy(), rel=1e-3, abs=1e-4, nan_ok=True)
    exported = max((project / "data/test/06_models/ppo_policy").glob("*/config.json")).parent
    assert {file.name for file in exported.iterdir()} == {file.name for file in chain.model("ppo_policy").iterdir()}
