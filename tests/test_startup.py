"""The packages that a command imports before it does anything, and Kedro's validation of parameters.

Modules are counted, not seconds: these took 2 s and more of processor time each, on a machine that does nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from kedro.framework.project import configure_project, pipelines
from kedro.pipeline import Node, Pipeline
from kedro.validation.type_extractor import TypeExtractor

from ppo_rlhf.config import PPOConfig

FRAMEWORKS = {"torch", "transformers", "peft", "trl", "datasets", "accelerate"}

PROGRAM = """
import sys
from kedro.framework.cli.cli import main
try:
    main()
finally:
    print("imported:", *sys.modules)
"""


def test_listing_the_pipelines_imports_neither_torch_nor_transformers(project: Path):
    program = [sys.executable, "-c", PROGRAM, "registry", "list"]
    done = subprocess.run(program, cwd=project, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.rpartition("imported:")[2].split())
    assert "ppo_rlhf.pipeline_registry" in modules
    assert not modules & FRAMEWORKS


@pytest.fixture
def registered() -> dict[str, Pipeline]:
    configure_project("ppo_rlhf")
    return dict(pipelines)


def test_kedro_finds_the_type_of_every_parameter_group(
    registered: dict[str, Pipeline], caplog: pytest.LogCaptureFixture
):
    """It evaluates all annotations of a node: a name that is not there switches the node's validation off."""
    found = TypeExtractor(registered).extract_types_from_pipelines()
    groups = {name for pipeline in registered.values() for name in pipeline.inputs() if name.startswith("params:")}
    assert {f"params:{name}" for name in found} == groups
    assert found["ppo"] is PPOConfig
    assert caplog.messages == []


def test_kedro_finds_no_type_where_an_annotation_names_nothing(caplog: pytest.LogCaptureFixture):
    def node(table: pd.DataFrame, ppo: PPOConfig) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        return table

    broken = Pipeline([Node(node, ["table", "params:ppo"], "result", name="node")])
    assert TypeExtractor({"broken": broken}).extract_types_from_pipelines() == {}
    assert "Could not extract type hints from function node" in caplog.text
