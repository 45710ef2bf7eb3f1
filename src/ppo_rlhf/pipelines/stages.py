"""Helpers to build the pipeline of a stage from nodes that are named like their functions."""

from collections.abc import Callable
from typing import Any

from kedro.pipeline import Node, Pipeline

Names = str | list[str] | dict[str, str] | None


def named(function: Callable[..., Any], inputs: Names, outputs: Names) -> Node:
    """Return a Kedro node that is named like its function."""
    return Node(function, inputs, outputs, name=function.__name__)


def stage(name: str, *nodes: Node) -> Pipeline:
    """Return the pipeline of a stage. The stage's name is the namespace of nodes; dataset names get no namespace."""
    return Pipeline(nodes, namespace=name, prefix_datasets_with_namespace=False)
