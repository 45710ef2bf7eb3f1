"""The commands of docs/questions.md are commands of the project, with options, pipelines and settings that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ppo_rlhf.cli import cli
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "questions.md").read_text()
BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "")
COMMANDS = re.findall(r"kedro [^\n#]+", BLOCKS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_questions_page_is_parsed(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    options = cli.commands[name].make_context(name, arguments).params
    assert set(options.get("pipelines") or []) <= register_pipelines().keys()
    for setting in options.get("params", {}).get("ppo", {}):
        assert setting in PPOConfig.__dataclass_fields__


def test_what_the_page_trains_from_own_pairs_reads_the_sft_model_and_the_pairs() -> None:
    [names] = re.findall(
        r"from your pairs.*?--pipelines ([\w,]+)`", (ROOT / "docs" / "your_model.md").read_text(), re.DOTALL
    )
    pipelines = register_pipelines()
    inputs = sum((pipelines[name] for name in names.split(",")), start=pipelines["align"]).inputs()
    assert {"sft_policy", "raw_preferences", "raw_prompts"} <= inputs
    assert "reward_model" not in inputs
