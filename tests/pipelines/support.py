"""Running a pipeline on given inputs, without a session and a catalog on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline
from kedro.runner import SequentialRunner


def outputs_of(pipeline: Pipeline, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a pipeline and return all that its nodes made, by name; an input may be None."""
    given = {name: MemoryDataset(value, copy_mode="assign") for name, value in inputs.items()}
    outputs = {name: _Kept() for name in pipeline.all_outputs()}
    SequentialRunner().run(pipeline, DataCatalog({**given, **outputs}))
    return {name: dataset.load() for name, dataset in outputs.items()}


class _Kept(MemoryDataset):
    def _release(self) -> None:
        """Keep what the runner would free once no node needs it."""
