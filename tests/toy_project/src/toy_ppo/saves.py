"""What stands in for checkpoints: a list of the iterations that were saved."""

from __future__ import annotations

from typing import NoReturn

from ppo_rlhf.datasets.checkpoints import RunDataset
from ppo_rlhf.ppo.training_state import TrainingState


class SavedIterations(RunDataset[TrainingState, NoReturn]):
    """One iteration a line, in a file of the run's folder."""

    def save(self, data: TrainingState) -> None:
        self.written.mkdir(parents=True, exist_ok=True)
        with (self.written / "saved_iterations.txt").open("a") as file:
            print(data.progress.iteration, file=file)

    def load(self) -> NoReturn:
        raise NotImplementedError
