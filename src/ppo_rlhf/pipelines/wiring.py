"""Nodes that have their function's name."""

from collections.abc import Callable
from typing import Any

from kedro.pipeline import Node

Names = str | list[str] | dict[str, str] | None


def named(function: Callable[..., Any], inputs: Names, outputs: Names) -> Node:
    """Return a Kedro node with the name of its function."""
    return Node(function, inputs, outputs, name=function.__name__)
