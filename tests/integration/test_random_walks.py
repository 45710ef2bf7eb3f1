"""The recipes on the random walks as a user starts them: from scratch to a known optimum, 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

pytestmark = pytest.mark.slow


RUNS = [
    ("randomwalks", 42, 0.97),
    ("randomwalks", 1, 0.97),
    ("randomwalks", 2, 0.97),
    ("sao", 42, 0.95),
    ("vapo", 42, 0.97),
]


@pytest.mark.parametrize(("environment", "seed", "least"), RUNS)
def test_walks_come_near_the_optimum(
    environment: str, seed: int, least: float, project: Path, kedro: Callable[..., Result]
) -> None:
    pipelines = "data_preparation,supervised_finetuning,align"
    finished = kedro(project, "run", "--env", environment, "--pipelines", pipelines, "--params", f"seed={seed}")
    assert finished.exit_code == 0, finished.output
    result = json.loads((project / "data" / environment / "08_reporting/evaluation_summary.json").read_text())
    print(f"seed {seed}:", json.dumps(result, indent=1))
    assert result["prompts"] == 20
    assert result["eval/judge_score_sft"] <= 0.9
    assert least <= result["eval/judge_score"] <= 1.0
