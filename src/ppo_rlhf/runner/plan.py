"""Cutting a pipeline that holds the loop into what runs before it, in it and after it.

The loop is a tagged sub-DAG and a carry: what an iteration returns as `next_training_state` is the `training_state` of
the next one. Kedro's DAG knows nothing of the carry, so a slice, a plot or Kedro-Viz sees one iteration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ppo_rlhf.core.errors import ConfigError

ITERATION_TAG = "iteration"
CARRY_IN = "training_state"
CARRY_OUT = "next_training_state"
METRICS = "ppo_metrics"


@dataclass(frozen=True)
class LoopPlan:
    """The nodes of each phase, in Kedro's topological order, and when each dataset is needed for the last time.

    Attributes:
        upstream: Nodes that run once before the loop, including those that have nothing to do with it.
        iteration: The tagged nodes.
        downstream: Untagged nodes that depend on an iteration.
        release_after_node: Datasets to release whenever the node of that name has run.
        release_after_loop: Datasets that outlive single iterations and that nothing downstream loads.
    """

    upstream: tuple[Node, ...]
    iteration: tuple[Node, ...]
    downstream: tuple[Node, ...]
    release_after_node: dict[str, list[str]] = field(default_factory=dict)
    release_after_loop: list[str] = field(default_factory=list)


def plan_loop(pipeline: Pipeline) -> LoopPlan | None:
    """Return how to run a pipeline that holds the closed loop, or None if it does not.

    The loop is closed if, within this pipeline, an untagged node makes the first `training_state`, a tagged one loads
    it and a tagged one returns `next_training_state`. A slice without one of these cuts the loop open; its nodes are
    then ordinary nodes that run once.

    Raises:
        ConfigError: An untagged node lies between tagged ones, so no phase could run it.
    """
    tagged = [node for node in pipeline.nodes if ITERATION_TAG in node.tags]
    first_state_is_made = any(CARRY_IN in node.outputs for node in pipeline.nodes if ITERATION_TAG not in node.tags)
    if not (first_state_is_made and _loads(tagged, CARRY_IN) and _makes(tagged, CARRY_OUT)):
        return None

    upstream: list[Node] = []
    downstream: list[Node] = []
    dependent: set[Node] = set()  # on an iteration
    for node in pipeline.nodes:
        parents = pipeline.node_dependencies[node]
        if ITERATION_TAG in node.tags:
            between = sorted(parent.name for parent in parents if parent in downstream)
            if between:
                raise ConfigError(
                    f"The loop's node {node.name} needs {', '.join(between)}, which depends on an iteration but has no "
                    f"tag '{ITERATION_TAG}'. Tag it, or take {node.name} out of the loop."
                )
            dependent.add(node)
        elif parents & dependent:
            downstream.append(node)
            dependent.add(node)
        else:
            upstream.append(node)
    return _with_releases(upstream, tagged, downstream, pipeline)


def _with_releases(upstream: list[Node], iteration: list[Node], downstream: list[Node], pipeline: Pipeline) -> LoopPlan:
    """Add the releases: a dataset lives until the last node that touches it, in whichever phase that is.

    Kedro's own counts would not do: they would drop a dataset after the first iteration that loads it. As with Kedro,
    the pipeline's own inputs and outputs are never released.
    """
    last_toucher: dict[str, Node] = {}
    for node in (*upstream, *iteration, *downstream):
        last_toucher.update(dict.fromkeys((*node.inputs, *node.outputs), node))
    made_in_iteration = {name for node in iteration for name in node.outputs}
    kept = pipeline.inputs() | pipeline.outputs()
    after_node: dict[str, list[str]] = {}
    after_loop: list[str] = []
    for name, node in last_toucher.items():
        if name in kept:
            continue
        read_by_runner = name in (CARRY_OUT, METRICS)  # at the end of each iteration, after its last node
        if node in iteration and (read_by_runner or name not in made_in_iteration):
            after_loop.append(name)
        else:
            after_node.setdefault(node.name, []).append(name)
    return LoopPlan(tuple(upstream), tuple(iteration), tuple(downstream), after_node, after_loop)


def _loads(nodes: Iterable[Node], name: str) -> bool:
    return any(name in node.inputs for node in nodes)


def _makes(nodes: Iterable[Node], name: str) -> bool:
    return any(name in node.outputs for node in nodes)
