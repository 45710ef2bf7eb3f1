"""What a run was asked to do, as the checks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol, DatasetError
from kedro.pipeline import Pipeline

from ppo_rlhf.core.errors import PPORLHFError, own_error

PROMPT_TABLES = ("raw_prompts", "raw_evaluation_prompts")
"""What prompts are read from: those to train on, and, if there are such, those to evaluate on."""


@dataclass
class RunRequest:
    """A pipeline, its catalog, and the problems found so far.

    Attributes:
        pipeline: What will run.
        catalog: Where its inputs come from; its parameters are validated.
        project_path: The project's directory.
        data_root: Where every layer that the project writes lies, relative to the project.
        problems: One line each.
    """

    pipeline: Pipeline
    catalog: CatalogProtocol
    project_path: Path
    data_root: str = "data"
    problems: list[str] = field(default_factory=list)

    def reads(self, name: str) -> bool:
        """Whether the run takes this dataset from the catalog, rather than making it or not needing it."""
        return name in self.pipeline.inputs() and name in self.catalog

    def writes(self, name: str) -> bool:
        """Whether a node of the run makes this dataset."""
        return name in self.pipeline.all_outputs()

    def group(self, name: str) -> Any:
        """Return a validated parameter group, None if no node of the run reads it."""
        return self.catalog[f"params:{name}"].load() if f"params:{name}" in self.pipeline.inputs() else None

    def load(self, name: str) -> Any:
        """Return what a dataset holds; None, and a problem noted, where it cannot be loaded."""
        return self.attempt(lambda: self.catalog[name].load())

    def source(self, name: str) -> str | None:
        """Return the path or hub id of a dataset."""
        dataset = self.catalog.get(name)
        source = dataset._describe().get("filepath") if dataset is not None else None
        return None if source is None else str(source)

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Return what the action returns; None, and the problem noted, if it raises an error of ours."""
        with self.noting():
            return action()
        return None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note errors of ours as problems and go on after the block."""
        try:
            yield
        except (PPORLHFError, DatasetError) as error:
            ours = own_error(error)
            if ours is None:
                raise
            self.problems += [line for line in str(ours).splitlines() if line not in self.problems]
