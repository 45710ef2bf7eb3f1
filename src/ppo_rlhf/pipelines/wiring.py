"""A stage as a pipeline, of nodes that have their function's name."""

from collections.abc import Callable
from typing import Any

from kedro.pipeline import Node, Pipeline

Names = str | list[str] | dict[str, str] | None


def named(function: Callable[..., Any], inputs: Names, outputs: Names) -> Node:
    """Return a Kedro node with the name of its function."""
    return Node(function, inputs, outputs, name=function.__name__)


def stage(name: str, *nodes: Node) -> Pipeline:
    """Return nodes as the pipeline of a stage; only they get its name as a namespace, not their datasets."""
    return Pipeline(nodes, namespace=name, prefix_datasets_with_namespace=False)
