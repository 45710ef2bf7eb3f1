"""What stands in for checkpoints: a list of the iterations that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from ppo_rlhf.ppo.training_state import TrainingState


class SavedIterations(AbstractDataset[TrainingState, list[int]]):
    """One iteration a line."""

    def __init__(self, filepath: str) -> None:
        self._path = Path(filepath)

    def save(self, data: TrainingState) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            print(data.progress.iteration, file=file)

    def load(self) -> list[int]:
        return [int(line) for line in self._path.read_text().splitlines()]

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path)}
