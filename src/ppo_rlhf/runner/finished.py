"""Finished work is not done again: a resumed run leaves out the stages that were finished with the same inputs.

Like make, but by content, and only for what comes before the loop. To be imported where a run begins, not before: it
is heavy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.datasets.fingerprints import Fingerprints
from ppo_rlhf.datasets.own_copy import OwnCopy, is_local_file
from ppo_rlhf.datasets.pretrained_model import PretrainedModelDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.runner.input_fingerprints import InputFingerprints
from ppo_rlhf.runner.plan import ITERATION_TAG
from ppo_rlhf.runner.work_records import Output, Record, WorkRecords

logger = logging.getLogger(__name__)

PPO = "ppo"
Chosen = Mapping[Node, Record]
Running = set[Node]


class FinishedWork:
    """What one run need not do again, and what later runs need not because this one did.

    Nodes that depend on an iteration, or are in the namespace `ppo`, always run. Of the others those are recorded
    whose outputs are all files or models. Make it before the first node runs: it notes what they are going to read.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Take the fingerprint of all that decides what the nodes make.

        Args:
            folder: Holds the records of all runs.
            pipeline: All of the run's pipeline.
            catalog: The run's catalog, after `read_own_writes`.
        """
        self._records, self._pipeline, self._catalog = WorkRecords(folder), pipeline, catalog
        self._contents = Fingerprints()
        self._makers = {name: node for node in pipeline.nodes for name in node.outputs}
        self._readers = {
            name: [node for node in pipeline.nodes if name in node.inputs] for name in pipeline.all_outputs()
        }
        self._optional = _before_the_loop(pipeline)
        self._made_from = InputFingerprints(pipeline, catalog, self._contents)
        inputs = {node: self._made_from.of(node) for node in pipeline.nodes if self._can_be_recorded(node)}
        self._inputs = {node: fingerprint for node, fingerprint in inputs.items() if fingerprint is not None}

    def remaining(self) -> Pipeline:
        """Return the pipeline without the nodes that need not run, and log a line for each of these.

        What a node that runs reads of one that does not is held as it was recorded, though other runs overwrite it.
        """
        chosen, running = self._settle()
        left_out = [node for node in self._pipeline.nodes if node not in running]
        for node in left_out:
            why = "only finished work reads what it makes"
            if self._is_asked_for(node, running):
                why = f"finished before with the same inputs, {self._hold(node, chosen[node], running)}"
            logger.info("Not done again: %s (%s)", node.name, why)
        return self._pipeline - Pipeline(left_out) if left_out else self._pipeline

    def record(self, node: Node) -> None:
        """Note that a node has run and its outputs are saved. If that fails, a warning says so: the run lacks nothing.

        Nothing is noted of a node that cannot be recorded, or whose inputs changed while it ran.
        """
        inputs = self._inputs.get(node)
        if inputs is None:
            return
        try:
            if self._made_from.of(node) != inputs:
                logger.info("%s: an input changed while it ran, so a resumed run will do it again.", node.name)
                return
            outputs = {name: self._current(name) for name in node.outputs}
            read = {name: self._current(name) for name in node.inputs if name in self._makers and self._is_kept(name)}
            fingerprints = {name: output.fingerprint for name, output in read.items()}
            self._records.write(node.name, inputs, Record(fingerprints, outputs))
        except (OSError, PPORLHFError) as error:
            logger.warning("%s: that it is finished could not be noted: %s", node.name, error)

    def _settle(self) -> tuple[Chosen, Running]:
        """Return the records to rely on, and the nodes that run.

        It begins with every node's best record, and drops the first that does not hold until all do.
        """
        candidates = {node: self._records.find(node.name, inputs) for node, inputs in self._inputs.items()}
        while True:
            chosen = {node: records[0] for node, records in candidates.items() if records}
            running = self._running(chosen)
            broken = next((node for node in chosen if not self._holds(node, chosen, running)), None)
            if broken is None:
                return chosen, running
            candidates[broken].pop(0)

    def _running(self, chosen: Chosen) -> Running:
        """Return the nodes that must run if these records stand for their nodes."""
        running: Running = set()
        for node in reversed(self._pipeline.nodes):
            if node not in self._optional or (self._is_asked_for(node, running) and node not in chosen):
                running.add(node)
        return running

    def _holds(self, node: Node, chosen: Chosen, running: Running) -> bool:
        """Return whether a record can stand for its node, or nobody asks for what the node makes."""
        if not self._is_asked_for(node, running):
            return True
        if self._ancestors(node) & running & self._inputs.keys():
            return False  # what it was made from is made anew, and may turn out otherwise
        for name, fingerprint in chosen[node].read.items():
            maker = self._makers[name]
            is_relied_on = maker in chosen and self._is_asked_for(maker, running)
            if is_relied_on and chosen[maker].outputs[name].fingerprint != fingerprint:
                return False  # made from another run's than the one that is relied on
        return all(self._is_there(name, output, running) for name, output in chosen[node].outputs.items())

    def _is_there(self, name: str, output: Output, running: Running) -> bool:
        """Return whether an output is what it was; of one that no node reads, only whether it exists if asked for."""
        if not self._is_read(name, running):
            return not self._is_goal(self._makers[name]) or output.path.exists()
        dataset: Any = self._catalog.get(name)
        try:
            if isinstance(dataset, PretrainedModelDataset):
                is_its_version = output.path.parent == Path(dataset._describe()["filepath"]).absolute()
                return is_its_version and self._contents.model(PretrainedHandle(str(output.path))) == output.fingerprint
            if output.path != Path(dataset._filepath).absolute():
                return False
            if isinstance(dataset, OwnCopy):
                return dataset.take(output.fingerprint)
            return self._contents.path(output.path) == output.fingerprint
        except (OSError, PPORLHFError):
            return False

    def _hold(self, node: Node, record: Record, running: Running) -> str:
        """Pin what is read of a node that does not run to the recorded version; return where the first of it lies."""
        places = {name: output.path for name, output in record.outputs.items()}
        read = [name for name in node.outputs if self._is_read(name, running)]
        for name in read:
            dataset = self._catalog.get(name)
            if isinstance(dataset, PretrainedModelDataset):
                dataset.pin(places[name])
        return os.path.relpath(places[(read or node.outputs)[0]])

    def _is_asked_for(self, node: Node, running: Running) -> bool:
        return self._is_goal(node) or any(self._is_read(name, running) for name in node.outputs)

    def _is_goal(self, node: Node) -> bool:
        """Return whether no node of the pipeline reads anything that this one makes: it is run for its own sake."""
        return not any(self._readers[name] for name in node.outputs)

    def _is_read(self, name: str, running: Running) -> bool:
        return any(reader in running for reader in self._readers[name])

    def _ancestors(self, node: Node) -> set[Node]:
        found: set[Node] = set()
        waiting = [node]
        while waiting:
            parents = self._pipeline.node_dependencies[waiting.pop()] - found
            found |= parents
            waiting.extend(parents)
        return found

    def _can_be_recorded(self, node: Node) -> bool:
        return node in self._optional and bool(node.outputs) and all(map(self._is_kept, node.outputs))

    def _is_kept(self, name: str) -> bool:
        dataset = self._catalog.get(name)
        return isinstance(dataset, PretrainedModelDataset) or is_local_file(dataset)

    def _current(self, name: str) -> Output:
        """Return what this run wrote to a dataset, or holds of it."""
        dataset: Any = self._catalog.get(name)
        if isinstance(dataset, PretrainedModelDataset):
            handle = PretrainedHandle(str(dataset.saved))
            return Output(Path(handle.source).absolute(), self._contents.model(handle))
        path = Path(dataset._filepath).absolute()
        is_held = isinstance(dataset, OwnCopy) and dataset.fingerprint is not None
        return Output(path, dataset.fingerprint if is_held else self._contents.path(path))


def _before_the_loop(pipeline: Pipeline) -> set[Node]:
    """Return the nodes that may be left out."""
    dependent: set[Node] = set()
    for node in pipeline.nodes:
        if ITERATION_TAG in node.tags or pipeline.node_dependencies[node] & dependent:
            dependent.add(node)
    return {node for node in pipeline.nodes if node not in dependent and (node.namespace or "").split(".")[0] != PPO}
