"""What the PPO loop needs is apart from how a run is assembled: reading the loop means reading few modules."""

from __future__ import annotations

from pathlib import Path

import grimp

import ppo_rlhf

MOST_MODULES, MOST_LINES = 61, 10_100
"""The limits. Raise a limit only for a feature of the loop itself, or where dense code is spread over more lines."""


def test_the_loop_imports_few_modules_and_none_that_loads_models_or_reads_tables():
    graph = grimp.build_graph("ppo_rlhf", exclude_type_checking_imports=True, cache_dir=None)
    modules = {"ppo_rlhf.ppo.loop", *graph.find_upstream_modules("ppo_rlhf.ppo.loop")}
    root = Path(ppo_rlhf.__file__).parents[1]
    files = [file for module in modules if (file := (root / module.replace(".", "/")).with_suffix(".py")).exists()]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert 30 < len(files) <= MOST_MODULES, sorted(modules)
    assert lines <= MOST_LINES
    assembling = {"models.loading", "models.adapters", "ppo.models", "rewards.functions", "data.prompts"}
    assert not modules & {f"ppo_rlhf.{name}" for name in assembling}
