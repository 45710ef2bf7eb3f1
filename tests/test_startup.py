"""The packages that a command imports before it does anything, and Kedro's validation of parameters.

Modules are counted, not seconds: these took 2 s and more of processor time each, on a machine that does nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from kedro.framework.project import configure_project, pipelines
from kedro.pipeline import Node, Pipeline
from kedro.validation.type_extractor import TypeExtractor

from ppo_rlhf.config import PPOConfig

MODELS = {"transformers.modeling_utils", "torch._dynamo", "peft", "trl", "datasets", "accelerate"}
"""With the code of models and trainers; nothing before the first node needs it."""
FRAMEWORKS = {"torch", "transformers", *MODELS}

PROGRAM = """
import os, sys
from pathlib import Path
from kedro.framework.cli.cli import main
from kedro.runner.task import Task

def tell(task=None):
    Path(os.environ["TOLD"]).write_text("\\n".join(["" if task is None else task.node.name, *sys.modules]))
    if task is not None:
        os._exit(0)

Task.execute = tell
try:
    main()
except SystemExit as end:
    if end.code:
        raise
tell()
"""


def imported(project: Path, *command: str) -> tuple[str, set[str]]:
    """Return the first node that a command runs, which is not carried out, and the modules it had imported by then."""
    told = project / "told.txt"
    program = [sys.executable, "-c", PROGRAM, *command]
    environment = {**os.environ, "TOLD": str(told)}
    done = subprocess.run(program, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    node, *modules = told.read_text().splitlines()
    return node, set(modules)


def test_listing_the_pipelines_imports_neither_torch_nor_transformers(project: Path):
    _, modules = imported(project, "registry", "list")
    assert "ppo_rlhf.pipeline_registry" in modules
    assert not modules & FRAMEWORKS


def test_a_run_comes_to_its_first_node_without_code_of_models(project: Path):
    node, modules = imported(project, "run")
    assert node == "data_preparation.split_demonstrations"
    assert "ppo_rlhf.preflight.checks" in modules
    assert not modules & MODELS


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
