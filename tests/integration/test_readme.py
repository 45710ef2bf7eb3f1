"""What the README and docs/your_model.md show for a model of one's own works as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ppo_rlhf.cli import cli
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.runtime.user_functions import load_function
from tests.tiny_models import save, tiny_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLONE = (ROOT / "docs" / "your_model.md").read_text().partition("**In a clone**")[2]
YAML_BLOCK = re.compile(r"```yaml\n# (conf/local/\w+\.yml)\n(.*?)```", re.DOTALL)
LINES = "".join(f"{json.dumps({'prompt': 'the film ' * count})}\n" for count in range(1, 9))
"""Prompts, one a line."""


def test_the_commands_for_ones_own_model_make_a_project_whose_reward_can_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.move(save(tmp_path / "saved", tiny_model(max_position_embeddings=96)), tmp_path / "models" / "my-sft")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/my_prompts.jsonl").write_text(LINES)
    [reward] = re.findall(r"```python\n# my_reward\.py\n(.*?)```", README, re.DOTALL)
    [commands] = re.findall(r"```bash\nppo_rlhf (init .*?)```", README, re.DOTALL)
    first, copy, doctor, short, run = commands.splitlines()
    assert CliRunner().invoke(cli, shlex.split(first)).exit_code == 0
    assert copy == "cp my_reward.py my-align && cd my-align"
    assert [line.split("#")[0].split() for line in (doctor, run)] == [["kedro", "doctor"], ["kedro", "run"]]
    assert short.split("#")[0].split() == ["kedro", "run", "--params", "ppo.total_episodes=512,prompts.max_held_out=64"]
    project = tmp_path / "my-align"
    (project / "my_reward.py").write_text(reward)
    written = yaml.safe_load((project / "conf/base/globals.yml").read_text())
    assert written["sft_model_path"] == str(tmp_path / "models/my-sft")
    assert written["prompts_path"] == str(tmp_path / "data/my_prompts.jsonl")
    [component] = written["reward_components"]
    assert component == {"type": "function", "function": "my_reward:score"}
    score = load_function(component["function"], project)
    assert call_reward_function(score, "score", ["p", "p"], ["good, so good", "bad"], {}) == [2.0, 0.0]


@pytest.mark.slow
def test_the_yaml_for_a_clone_runs(make_project: Callable[[], Path]) -> None:
    project = make_project()
    blocks = dict(YAML_BLOCK.findall(CLONE)[:2])
    assert set(blocks) == {"conf/local/globals.yml", "conf/local/parameters.yml"}
    for name, text in blocks.items():
        (project / name).write_text(text)
    shutil.move(save(project / "saved", tiny_model(max_position_embeddings=96)), project / "models" / "my-sft")
    (project / "my_reward.py").write_text(
        "def score(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    own = project / "models/my-sft"
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    (project / "data/my_prompts.jsonl").write_text(LINES)
    small = "ppo.total_episodes=8,ppo.per_device_train_batch_size=4,evaluation.iteration_prompts=4"
    finished = subprocess.run(
        [sys.executable, "-m", "kedro", "run", "--pipelines", "align", "--params", small],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (project / "data/08_reporting/report.html").is_file()
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before, "a user's own model was changed"
