"""The trainings of a sweep: their runs in MLflow, what a failed one leaves, what a resumed sweep leaves out."""

import signal
from pathlib import Path
from typing import Any

import mlflow
import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.datasets import TrainingLogDataset
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.pipelines.sweep import nodes
from ppo_rlhf.pipelines.sweep.child_run import child_runs
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.signals import RunInterruptedError
from ppo_rlhf.studies.sweep import Setting, SweepConfig, settings_of


def test_runs_below_a_sweep_stay_in_its_store_whatever_a_reward_function_does_to_mlflow(
    tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None
):
    (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    with mlflow.start_run(experiment_id="0") as parent:  # whatever experiment an earlier test has left
        child_run = child_runs()
        for name in ("first", "second"):
            with child_run(name, {"ppo.kl_coef": "0.25"}) as log:
                log(1, {"objective/kl": 1.0})
                mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'other.db'}")  # as a reward function may
                log(2, {"objective/kl": 2.0})
        with pytest.raises(RunInterruptedError), child_run("third", {}):
            raise RunInterruptedError(signal.SIGTERM)
        mlflow.set_tracking_uri(store)
    client = mlflow.MlflowClient(store)
    runs = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    ends = {run.info.run_name: run.info.status for run in runs}
    assert ends == {"first": "FINISHED", "second": "FINISHED", "third": "KILLED"}
    for run in runs[1:]:
        points = client.get_metric_history(run.info.run_id, "objective/kl")
        assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 2.0)]
        assert run.data.params["ppo.kl_coef"] == "0.25"
    assert not (tmp_path / "other.db").exists()


def test_without_a_run_the_trainings_of_a_sweep_log_nothing(tmp_path: Path, no_mlflow_left_over: None):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with child_runs()("first", {}) as log:
        log(1, {"objective/kl": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a sweep over three betas, after earlier trainings; a training ends as `ends` says for its name."""
    ends: dict[str, Exception] = {}

    def train(each: Setting, *_: Any) -> dict[str, Any]:
        if each.name in ends:
            raise ends[each.name]
        return {"history": [{"iteration": 1.0}], "results": {"kl": 1.0}}

    monkeypatch.setattr(nodes, "_train", train)
    reward = RewardConfig(components=[{"type": "model"}])

    def run(earlier: list[dict[str, Any]], failing: dict[str, Exception], **ppo: Any) -> Any:
        ends.clear()
        ends.update(failing)
        settings = settings_of(SweepConfig(grid={"ppo.kl_coef": [1, 2, 3]}, seeds=[1]), PPOConfig(**ppo), reward)
        given: Any = [None] * 5
        return nodes.train_settings(settings, *given, EvaluationConfig(prompts_path="prompts.jsonl"), earlier)

    return run


def test_a_training_that_fails_leaves_the_others_and_a_resumed_sweep_trains_only_it_again(sweep: Any) -> None:
    first = list(sweep([], {"kl_coef=2": TrainingError("it diverged")}))
    assert [(row["name"], row["error"]) for row in first] == [
        ("kl_coef=1", None),
        ("kl_coef=2", "kl_coef=2: TrainingError: it diverged"),
        ("kl_coef=3", None),
    ]
    assert [(row["name"], row["error"]) for row in sweep(first, {})] == [("kl_coef=2", None)]
    assert len(list(sweep(first, {}, total_episodes=20_000))) == 3  # of other settings none is finished


def test_a_signal_ends_a_sweep_and_what_ended_before_it_is_not_trained_again(sweep: Any) -> None:
    trainings = sweep([], {"kl_coef=2": RunInterruptedError(signal.SIGTERM)})
    rows = [next(trainings)]
    with pytest.raises(RunInterruptedError):
        next(trainings)
    assert [row["name"] for row in sweep(rows, {})] == ["kl_coef=2", "kl_coef=3"]


def test_of_several_processes_none_continues_without_the_others(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="it diverged"):
        list(sweep([], {"kl_coef=1": TrainingError("it diverged")}, per_device_train_batch_size=32))


def test_the_log_of_trainings_keeps_the_last_try_of_each(tmp_path: Path, no_mlflow_left_over: None) -> None:
    log = TrainingLogDataset(str(tmp_path))
    assert log.load() == []
    for name, error in (("first", "it diverged"), ("second", None), ("first", None)):
        log.save({"name": name, "error": error})
    assert log.load() == [{"name": "second", "error": None}, {"name": "first", "error": None}]
