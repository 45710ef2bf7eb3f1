"""The worked example of an environment, smaller: PPO teaches a policy to call the calculator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from click.testing import Result
from scripts.write_calculator import write_files

pytestmark = pytest.mark.slow

SMALLER = (
    "supervised_finetuning.num_train_epochs=12,supervised_finetuning.per_device_train_batch_size=64,"
    "supervised_finetuning.learning_rate=1.0e-2,ppo.total_episodes=640,ppo.learning_rate=5.0e-4,ppo.eval_interval=5"
)


def test_a_policy_learns_to_call_the_calculator(project: Path, kedro: Callable[..., Result]) -> None:
    demonstrations, prompts = write_files(project / "data/01_raw", largest=4, demonstrations=800, prompts=10)
    paths = f"demonstrations_path={demonstrations},prompts_path={prompts}"
    pipelines = "data_preparation,supervised_finetuning,align"
    finished = kedro(project, "run", "--env", "calculator", "--pipelines", pipelines, "--params", f"{paths},{SMALLER}")
    assert finished.exit_code == 0, finished.output
    history = pd.read_csv(project / "data/calculator/07_model_output/training_history/training_history.csv")
    first, last = history.iloc[:2].mean(), history.iloc[-2:].mean()
    assert first["response/turns"] < 1.7
    assert last["response/turns"] > 1.85
    assert last["objective/scores"] > first["objective/scores"] + 0.12
    page = (project / "data/calculator/08_reporting/report.html").read_text()
    assert "Calculator" in page
