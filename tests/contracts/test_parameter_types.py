"""Kedro validates each parameter group by the annotations of the nodes that read it."""

from __future__ import annotations

import pytest
from kedro.framework.project import configure_project, pipelines
from kedro.pipeline import Pipeline
from kedro.validation.type_extractor import TypeExtractor

from ppo_rlhf.config import PPOConfig


@pytest.fixture
def registered() -> dict[str, Pipeline]:
    configure_project("ppo_rlhf")
    return dict(pipelines)


def test_kedro_finds_the_type_of_every_parameter_group(
    registered: dict[str, Pipeline], caplog: pytest.LogCaptureFixture
):
    """Kedro evaluates all annotations of a node; a name that is not imported switches the node's validation off."""
    found = TypeExtractor(registered).extract_types_from_pipelines()
    groups = {name for pipeline in registered.values() for name in pipeline.inputs() if name.startswith("params:")}
    assert {f"params:{name}" for name in found} == groups
    assert found["ppo"] is PPOConfig
    assert caplog.messages == []
