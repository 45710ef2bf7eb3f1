"""What stands in for checkpoints: a list of the iterations that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset


class SaveRequest:
    """A state that is due after the last iteration, and when the run was asked to stop."""

    def __init__(self, state: Any) -> None:
        self.state = state

    @property
    def checkpoint_due(self) -> bool:
        return self.state.finished or self.state.requests.stop


class SavedIterations(AbstractDataset[SaveRequest, list[int]]):
    """One iteration a line."""

    def __init__(self, filepath: str) -> None:
        self._path = Path(filepath)

    def save(self, data: SaveRequest) -> None:
        if data.checkpoint_due:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                print(data.state.iteration, file=file)

    def load(self) -> list[int]:
        return [int(line) for line in self._path.read_text().splitlines()]

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path)}
