"""The recipe randomwalks as a user starts it: PPO from scratch in less than a minute to a known optimum, 1."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [42, 1, 2])
def test_walks_come_within_3_percent_of_the_optimum(seed: int, project: Path, kedro: Callable[..., Result]) -> None:
    started = time.monotonic()
    pipelines = "data_preparation,supervised_finetuning,align"
    finished = kedro(project, "run", "--env", "randomwalks", "--pipelines", pipelines, "--params", f"seed={seed}")
    seconds = time.monotonic() - started
    assert finished.exit_code == 0, finished.output
    result = json.loads((project / "data/randomwalks/08_reporting/evaluation_summary.json").read_text())
    print(f"seed {seed}, {seconds:.0f} s:", json.dumps(result, indent=1))
    assert result["prompts"] == 20
    assert result["eval/judge_score_sft"] <= 0.9
    assert 0.97 <= result["eval/judge_score"] <= 1.0
    assert seconds < 60
