"""The pictures of the pipeline in docs/images show the pipeline of today."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ppo_rlhf.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "write_pictures.py"))


@pytest.mark.parametrize(("name", "nodes_alone"), [("flow.png", False), ("ppo_flow.png", True)])
def test_a_picture_of_the_pipeline_was_drawn_from_the_pipeline_of_today(name: str, nodes_alone: bool):
    pipeline = register_pipelines()["ppo"]
    drawn_from = Image.open(ROOT / "docs" / "images" / name).info.get("pipeline")
    assert drawn_from == SCRIPT["digest"](pipeline, nodes_alone=nodes_alone), "run: python scripts/write_pictures.py"
    for node in pipeline.nodes:
        without = pipeline - pipeline.only_nodes(node.name)
        assert SCRIPT["digest"](without, nodes_alone=nodes_alone) != drawn_from, f"{node.name} may go unseen"
