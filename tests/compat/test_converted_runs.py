"""A converted configuration runs: with the real command, on tiny models, with the batch sizes of the source."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from tests.compat.trl_source import LEGACY_SCRIPT
from tests.tiny_models import save, tiny_model

PROMPTS = [f"{a} {b} c" for a in "abcdefghij" for b in "klmnopqrst"]


@pytest.mark.slow
def test_the_script_of_trls_legacy_api_runs(kedro: Callable[..., Result], project: Path, tmp_path: Path):
    save(project / "models" / "policy", tiny_model())
    (project / "data" / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': p})}\n" for p in PROMPTS))
    (project / "own_reward.py").write_text(
        "def score(prompts, completions, **columns):\n    return [float(text.count('a')) for text in completions]\n"
    )
    (tmp_path / "legacy.yaml").write_text(yaml.safe_dump(LEGACY_SCRIPT))
    assert kedro(project, "convert-config", "--from", "trl", str(tmp_path / "legacy.yaml")).exit_code == 0
    (project / "conf" / "local" / "parameters_reward.yml").write_text(
        yaml.safe_dump({"reward": {"components": [{"type": "function", "function": "own_reward:score"}]}})
    )
    own = "sft_model_path=models/policy,prompts_path=data/prompts.jsonl,ppo.total_episodes=256,ppo.response_length=6"
    result = kedro(project, "run", "--pipelines", "ppo", "--params", own)
    assert result.exit_code == 0, result.output
    with sqlite3.connect(project / "mlflow.db") as database:
        params = dict(database.execute("select key, value from params"))
    assert {name: params[f"ppo.{name}"] for name in ("kl_coef", "kl_controller", "value_model", "target_kl")} == {
        "kl_coef": "0.2",
        "kl_controller": "adaptive",
        "value_model": "shared",
        "target_kl": "None",
    }
    history = (
        (project / "data" / "07_model_output" / "training_history" / "training_history.csv").read_text().splitlines()
    )
    row = dict(zip(history[0].split(","), history[-1].split(","), strict=True))
    assert float(row["optimiser/steps"]) == 32  # 4 epochs of 256 / 32 minibatches
    assert float(row["episode"]) == 256
