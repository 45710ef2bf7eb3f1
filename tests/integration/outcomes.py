"""What a finished `kedro run` left behind, in a form that two runs can be compared by."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

OF_THE_CLOCK = re.compile(r"time/.*|throughput/.*|memory/.*")
MODELS = ("sft_policy", "reward_model", "ppo_policy")


@dataclass(frozen=True)
class Outcome:
    """All that must be equal, to the last bit, whether a run was interrupted or not.

    Attributes:
        status: Of its MLflow run.
        metrics: Every metric but clocks: key -> [(step, value), …] as MLflow has them, repeated steps included.
        weights: SHA-256 of each weight file of its last checkpoint, and of the models that were written last.
    """

    status: str
    metrics: dict[str, list[tuple[int, str]]]
    weights: dict[str, str]

    @classmethod
    def of(cls, project: Path, seed: int | None = None) -> Outcome:
        """Read it; the project must hold exactly one MLflow run, with this seed if one is given.

        With a seed, models are left out: another run may have written the newest ones.
        """
        client, runs = tracked(project)
        [run] = [run for run in runs if seed is None or run.data.tags["seed"] == str(seed)]
        keys = sorted(key for key in run.data.metrics if not OF_THE_CLOCK.fullmatch(key))
        history = {
            key: sorted((point.step, repr(point.value)) for point in client.get_metric_history(run.info.run_id, key))
            for key in keys
        }
        return cls(run.info.status, history, weights(project, run.info.run_id, MODELS if seed is None else ()))

    def differences(self, other: Outcome) -> list[str]:
        """Name what is not equal."""
        status = [] if self.status == other.status else [f"status {self.status}, {other.status}"]
        parts = ((self.metrics, other.metrics), (self.weights, other.weights))
        return status + sorted(
            f"{name}: {ours.get(name)}, {theirs.get(name)}"
            for ours, theirs in parts
            for name in ours.keys() | theirs.keys()
            if ours.get(name) != theirs.get(name)
        )


def tracked(project: Path) -> tuple[MlflowClient, list[Run]]:
    """Return a client of the project's store and all runs in it, the newest first."""
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiments = client.search_experiments(filter_string="name = 'ppo_rlhf'")
    return client, list(client.search_runs([e.experiment_id for e in experiments]))


def weights(project: Path, run_id: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the hashes of the newest version of each model and of the newest checkpoint's tensors."""
    models = project / "data/test/06_models"
    newest = {name: max((models / name).glob("*/config.json")).parent for name in names}
    newest["checkpoint"] = max((models / "ppo_checkpoints" / run_id).glob("iteration_*"))
    return {
        f"{name}/{file.relative_to(folder)}": hashlib.sha256(file.read_bytes()).hexdigest()
        for name, folder in newest.items()
        for file in sorted(folder.rglob("*.safetensors"))
        if file.name != "history.safetensors"  # holds clocks, too
    }
