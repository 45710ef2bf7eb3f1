"""Imports, those inside functions included: they have no circle, and PPO's loop assembles no run."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp
import pytest


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("ppo_rlhf", exclude_type_checking_imports=True, cache_dir=None)


def test_imports_have_no_circle(graph: grimp.ImportGraph) -> None:
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle


def test_the_loop_imports_nothing_that_loads_models_or_reads_tables(graph: grimp.ImportGraph) -> None:
    assembling = {f"ppo_rlhf.{name}" for name in ("models.loading", "models.adapters", "ppo.run_setup", "data.prompts")}
    assert assembling <= graph.modules
    assert assembling.isdisjoint(graph.find_upstream_modules("ppo_rlhf.ppo.loop"))
