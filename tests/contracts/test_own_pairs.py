"""What docs/your_model.md trains from own pairs. Its commands, as those of all pages, are parsed in another test."""

from __future__ import annotations

import re
from pathlib import Path

from ppo_rlhf.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[2]


def test_what_the_page_trains_from_own_pairs_reads_the_sft_model_and_the_pairs() -> None:
    [names] = re.findall(
        r"from your pairs.*?--pipelines ([\w,]+)`", (ROOT / "docs" / "your_model.md").read_text(), re.DOTALL
    )
    pipelines = register_pipelines()
    inputs = sum((pipelines[name] for name in names.split(",")), start=pipelines["align"]).inputs()
    assert {"sft_policy", "raw_preferences", "raw_prompts"} <= inputs
    assert "reward_model" not in inputs
