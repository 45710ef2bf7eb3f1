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
        to_next_state: The tagged nodes up to the one that makes the next state.
        behind_it: The tagged nodes that depend on that one.
        tail: Those of them that can be run again for a state from a checkpoint: they need it and what was made before
            the loop, and nothing else of the iteration.
        downstream: Untagged nodes that depend on an iteration.
        release_after_node: Datasets to release whenever the node of that name has run.
        release_after_loop: Datasets that outlive single iterations and that nothing downstream loads.
    """

    upstream: tuple[Node, ...]
    to_next_state: tuple[Node, ...] = ()
    behind_it: tuple[Node, ...] = ()
    tail: tuple[Node, ...] = ()
    downstream: tuple[Node, ...] = ()
    release_after_node: dict[str, list[str]] = field(default_factory=dict)
    release_after_loop: list[str] = field(default_factory=list)

    @property
    def iteration(self) -> tuple[Node, ...]:
        """The tagged nodes; none if the pipeline does not hold the closed loop."""
        return self.to_next_state + self.behind_it


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
    carry = next(node for node in tagged if CARRY_OUT in node.outputs)
    behind = _behind(carry, tagged, pipeline)
    to_next_state = [*(node for node in tagged if node is not carry and node not in behind), carry]
    after_node, after_loop = _releases(upstream, [*to_next_state, *behind], downstream, pipeline)
    return LoopPlan(
        upstream=tuple(upstream),
        to_next_state=tuple(to_next_state),
        behind_it=tuple(behind),
        tail=_tail(behind, tagged),
        downstream=tuple(downstream),
        release_after_node=after_node,
        release_after_loop=after_loop,
    )


def plan_once(pipeline: Pipeline) -> LoopPlan:
    """Return how to run a pipeline that does not hold the closed loop: each node once."""
    after_node, _ = _releases(pipeline.nodes, [], [], pipeline)
    return LoopPlan(upstream=tuple(pipeline.nodes), release_after_node=after_node)


def _behind(carry: Node, iteration: list[Node], pipeline: Pipeline) -> list[Node]:
    """Return the iteration's nodes that depend on `carry`."""
    behind: list[Node] = []
    for node in iteration:
        if not pipeline.node_dependencies[node].isdisjoint({carry, *behind}):
            behind.append(node)
    return behind


def _tail(behind: list[Node], iteration: list[Node]) -> tuple[Node, ...]:
    """Return those that need the next state but nothing else of an iteration that has not been made anew."""
    gone = {name for node in iteration for name in node.outputs} - {CARRY_OUT} | {CARRY_IN}
    tail: list[Node] = []
    for node in behind:
        if gone.isdisjoint(node.inputs):
            tail.append(node)
            gone.difference_update(node.outputs)
    return tuple(tail)


def _releases(
    upstream: list[Node], iteration: list[Node], downstream: list[Node], pipeline: Pipeline
) -> tuple[dict[str, list[str]], list[str]]:
    """Return what to release after which node, and after the loop: a dataset lives until its last use in any phase.

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
    return after_node, after_loop


def _loads(nodes: Iterable[Node], name: str) -> bool:
    return any(name in node.inputs for node in nodes)


def _makes(nodes: Iterable[Node], name: str) -> bool:
    return any(name in node.outputs for node in nodes)
