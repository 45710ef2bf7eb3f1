"""What the README shows works as it stands there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save, tiny_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
YAML_BLOCK = re.compile(r"```yaml\n# (conf/local/\w+\.yml)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_the_yaml_for_ones_own_model_reward_and_prompts_runs(make_project: Callable[[], Path]) -> None:
    project = make_project()
    blocks = dict(YAML_BLOCK.findall(README))
    assert set(blocks) == {"conf/local/globals.yml", "conf/local/parameters.yml"}
    for name, text in blocks.items():
        (project / name).write_text(text)
    shutil.move(save(project / "saved", tiny_model(max_position_embeddings=96)), project / "models" / "my-sft")
    (project / "my_reward.py").write_text(
        "def score(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    own = project / "models/my-sft"
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    lines = [json.dumps({"prompt": "the film " * count}) for count in range(1, 9)]
    (project / "data/my_prompts.jsonl").write_text("\n".join(lines))
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


def test_the_ten_lines_of_python_train_and_save_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.move(save(tmp_path / "saved", tiny_model(max_position_embeddings=96)), tmp_path / "models" / "my-sft")
    [script] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    fewer = script.replace("total_episodes=1_000", "total_episodes=128")
    assert fewer != script
    names: dict[str, Any] = {}
    exec(compile(fewer, "README.md", "exec"), names)
    assert len(names["trainer"].history) == 4
    whole = replace(names["config"], total_episodes=1000)
    assert whole.num_total_batches <= 100, "the example ends within two minutes"
    assert (tmp_path / "my-policy" / "model.safetensors").is_file()


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
