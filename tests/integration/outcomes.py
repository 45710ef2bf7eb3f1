"""The results of a `kedro run`, in a form in which two runs can be compared."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.entities import Run as TrackedRun

OF_THE_CLOCK = re.compile(r"time/.*|throughput/.*|memory/.*")
MODELS = ("sft_policy", "reward_model", "ppo_policy")


@dataclass(frozen=True)
class Run:
    """A project in which `kedro run --env test` made one MLflow run, and what the last command printed."""

    project: Path
    output: str

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.project}/mlflow.db")

    @property
    def tracked(self) -> TrackedRun:
        experiments = self.client.search_experiments(filter_string="name = 'ppo_rlhf'")
        [run] = self.client.search_runs([experiment.experiment_id for experiment in experiments])
        return run

    @property
    def folder(self) -> Path:
        """The run's folder of checkpoints."""
        return self.project / "data/test/06_models/ppo_checkpoints" / self.tracked.info.run_id

    def says(self, text: str) -> bool:
        """Whether the command printed this; lines of a log are wrapped, within paths too."""
        return "".join(text.split()) in "".join(self.output.split())

    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        run_id = self.tracked.info.run_id
        return {
            key: [(point.step, point.value) for point in self.client.get_metric_history(run_id, key)]
            for key in self.tracked.data.metrics
        }

    def points(self) -> Counter[tuple[str, int]]:
        """Return how often each metric was logged at each step."""
        return Counter((key, step) for key, history in self.metrics().items() for step, _ in history)

    def logged_models(self) -> list[LoggedModel]:
        return list(self.client.search_logged_models([self.tracked.info.experiment_id]))

    def model(self, name: str) -> Path:
        """Return the newest version of a model."""
        return max((self.project / "data/test/06_models" / name).glob("*/config.json")).parent

    def outcome(self) -> dict[str, object]:
        """Return what must be equal to the last bit, whether a run was interrupted or not.

        That is every metric but clocks, as often as MLflow has it, and the weights of the models and of the last
        checkpoint.
        """
        metrics = {
            key: sorted((step, repr(value)) for step, value in history)
            for key, history in self.metrics().items()
            if not OF_THE_CLOCK.fullmatch(key)
        }
        folders = {name: self.model(name) for name in MODELS} | {"checkpoint": max(self.folder.glob("iteration_*"))}
        weights = {
            f"{name}/{file.relative_to(folder)}": hashlib.sha256(file.read_bytes()).hexdigest()
            for name, folder in folders.items()
            for file in folder.rglob("*.safetensors")
            if file.name != "history.safetensors"  # holds clocks, too
        }
        return {"status": self.tracked.info.status, **metrics, **weights}
