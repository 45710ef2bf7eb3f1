"""What decides what a node makes, as one fingerprint: its parameters, its data, its models.

Versions of libraries do not count: a run that goes on after an update must not meet another reference policy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ppo_rlhf.checkpoints.resume import MAY_CHANGE
from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.datasets.fingerprints import Fingerprints, functions_in, source_file
from ppo_rlhf.datasets.own_copy import is_local_file
from ppo_rlhf.datasets.pretrained_model import PretrainedModelDataset
from ppo_rlhf.datasets.records import RecordsDataset

NOTHING = "nothing given"


class InputFingerprints:
    """Fingerprints of what the nodes of a pipeline are made from.

    Parameters count by value, functions that they name by their source file too, data and models by content. What
    another node of the pipeline makes counts by that node's own fingerprint, so it need not be made to be compared.
    """

    def __init__(self, pipeline: Pipeline, catalog: CatalogProtocol, contents: Fingerprints) -> None:
        """Read nothing yet."""
        self._catalog, self._contents = catalog, contents
        self._makers = {name: node for node in pipeline.nodes for name in node.outputs}

    def of(self, node: Node) -> str | None:
        """Return the fingerprint of all that a node is made from; None if some of that has none, or is not there."""
        return self._of(node, {})

    def _of(self, node: Node, known: dict[Node, str | None]) -> str | None:
        if node not in known:
            inputs = {name: self._input(name, known) for name in sorted(set(node.inputs))}
            made_from = {"node": node.name, "inputs": inputs}
            known[node] = None if None in inputs.values() else _digest(made_from)
        return known[node]

    def _input(self, name: str, known: dict[Node, str | None]) -> str | None:
        if name in self._makers:
            made_from = self._of(self._makers[name], known)
            return None if made_from is None else f"{name} of {made_from}"
        dataset: Any = self._catalog.get(name)
        if name == "parameters" or name.startswith("params:"):
            return _parameters(name, dataset.load())
        try:
            return self._content(dataset)
        except (OSError, PPORLHFError):  # not there: the node that reads it says so better
            return None

    def _content(self, dataset: Any) -> str | None:
        if isinstance(dataset, PretrainedModelDataset):
            handle = dataset.load()
            return NOTHING if handle is None else self._contents.model(handle)
        if isinstance(dataset, RecordsDataset):
            path = dataset._describe()["filepath"]
            return NOTHING if path is None else self._contents.path(Path(path))
        return self._contents.path(Path(dataset._filepath)) if is_local_file(dataset) else None


def _parameters(name: str, value: Any) -> str:
    values = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    if name == "params:ppo" and isinstance(values, Mapping):
        values = {key: setting for key, setting in values.items() if key not in MAY_CHANGE}
    project = next((path for path in (Path.cwd(), *Path.cwd().parents) if (path / "pyproject.toml").is_file()), Path())
    found = {reference: source_file(reference, project) for reference in functions_in(values)}
    sources = {
        reference: hashlib.sha256(file.read_bytes()).hexdigest()
        for reference, file in found.items()
        if file is not None
    }
    return _digest({"values": values, "sources": sources})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
