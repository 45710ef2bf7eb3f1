"""The trainings of a sweep: their runs in MLflow, what a failed one leaves, what a resumed sweep leaves out."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlflow
import pandas as pd
import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.evaluation.best_of_n import PROMPT
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.pipelines.sweep import nodes
from ppo_rlhf.pipelines.sweep.child_run import child_runs
from ppo_rlhf.pipelines.sweep.grid import Setting, SweepConfig, plan_sweep
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runtime.signals import RunInterruptedError


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
    assert all(run.data.tags["set"] == run.info.run_name for run in runs)
    assert ends == {"first": "FINISHED", "second": "FINISHED", "third": "KILLED"}
    for run in runs[1:]:
        points = client.get_metric_history(run.info.run_id, "objective/kl")
        assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 2.0)]
        assert run.data.params["ppo.kl_coef"] == "0.25"
    assert not (tmp_path / "other.db").exists()


def test_a_process_that_is_forked_in_a_training_does_not_end_its_run(
    tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    ended, parent = tmp_path / "ended", os.getpid()
    ended.touch()

    def note(client: mlflow.MlflowClient, run_id: str, status: str) -> None:
        ended.write_text(f"{ended.read_text()}{os.getpid()} {status}\n")

    try:
        with mlflow.start_run(experiment_id="0"), child_runs()("first", {}):
            monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", note)
            if (child := os.fork()) == 0:
                raise ValueError("no")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        if os.getpid() != parent:
            os._exit(99)  # it would go on with the tests
        monkeypatch.undo()
    assert ended.read_text().splitlines()[0] == f"{parent} FINISHED"


def test_without_a_run_the_trainings_of_a_sweep_log_nothing(tmp_path: Path, no_mlflow_left_over: None):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with child_runs()("first", {}) as log:
        log(1, {"objective/kl": 1.0})
    assert not list(tmp_path.iterdir())


Sweep = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, migrated_database: Path, no_mlflow_left_over: None
) -> tuple[Sweep, list[str]]:
    """Return a sweep over three betas in one MLflow run, and the trainings that it has begun so far.

    A training ends as `failing` says for its name.
    """
    (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.start_run(experiment_id="0")
    reward, begun = RewardConfig(components=[{"type": "model"}]), []

    def run(failing: Mapping[str, Exception] = MappingProxyType({}), **ppo: Any) -> list[dict[str, Any]]:
        def train(each: Setting, *, track: Any, **given: Any) -> dict[str, float]:
            begun.append(each.name)
            if each.name in failing:
                raise failing[each.name]
            metrics = {"eval/kl": each.ppo.kl_coef / 3}
            track(1, {"objective/kl": 9.0} | metrics)
            return metrics

        monkeypatch.setattr(nodes, "_train", train)
        settings = plan_sweep(PPOConfig(**ppo), reward, SweepConfig(grid={"ppo.kl_coef": [1, 2, 3]}, seeds=[1]))
        given: Any = [None] * 5
        return nodes.train_settings(settings, *given, EvaluationConfig(prompts_path="prompts.jsonl"))

    return run, begun


def test_a_training_that_fails_leaves_the_others_and_a_resumed_sweep_trains_only_it_again(
    sweep: tuple[Sweep, list[str]],
) -> None:
    run, begun = sweep
    rows = run({"kl_coef=2": TrainingError("it diverged")})
    assert rows == [
        {"setting": "kl_coef=1", "error": "", "kl": 1 / 3},
        {"setting": "kl_coef=2", "error": "kl_coef=2: TrainingError: it diverged"},
        {"setting": "kl_coef=3", "error": "", "kl": 1.0},
    ]
    begun.clear()
    assert run() == [rows[0], {"setting": "kl_coef=2", "error": "", "kl": 2 / 3}, rows[2]]
    assert begun == ["kl_coef=2"]
    run(total_episodes=20_000)
    assert len(begun) == 4  # of other settings none is finished


def test_a_signal_ends_a_sweep_and_what_ended_before_it_is_not_trained_again(sweep: tuple[Sweep, list[str]]) -> None:
    run, begun = sweep
    with pytest.raises(RunInterruptedError):
        run({"kl_coef=2": RunInterruptedError(signal.SIGTERM)})
    begun.clear()
    assert len(run()) == 3
    assert begun == ["kl_coef=2", "kl_coef=3"]


def test_a_sweep_whose_trainings_all_failed_is_refused(sweep: tuple[Sweep, list[str]]) -> None:
    failing = {f"kl_coef={beta}": TrainingError("it diverged") for beta in (1, 2, 3)}
    with pytest.raises(TrainingError, match="all 3 trainings failed; kl_coef=1: TrainingError: it diverged"):
        sweep[0](failing)


def test_of_several_processes_none_continues_without_the_others(
    sweep: tuple[Sweep, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "process_count", lambda: 2)
    with pytest.raises(TrainingError, match="it diverged"):
        sweep[0]({"kl_coef=1": TrainingError("it diverged")})
    assert sweep[1] == ["kl_coef=1"]


def test_the_table_and_the_figure_show_each_setting_beside_best_of_n() -> None:
    rows = [
        {"setting": beta, "error": "", "judge_score": 0.5, "win_rate": 0.6, "reward": x, "kl": 2 * x}
        for beta, x in (("low", 1.0), ("low", 2.0), ("high", 3.0))
    ]
    samples = pd.DataFrame({PROMPT: [0, 0, 1, 1], "reward": [0.0, 1.0, 2.0, 3.0], "judge_score": [0.0, 1.0, 1.0, 0.0]})
    table, figure = nodes.compare_settings([*rows, {"setting": "broken", "error": "it diverged"}], samples)
    assert table["setting"].tolist() == ["low", "high", "broken"]
    drawn = {(trace.name, trace.xaxis) for trace in figure.data}
    both, no_win_rate = {("low", axis) for axis in ("x", "x2", "x3")}, {("best-of-n", "x"), ("best-of-n", "x3")}
    assert drawn == both | {("high", axis) for axis in ("x", "x2", "x3")} | no_win_rate
    [low] = [trace for trace in figure.data if (trace.name, trace.xaxis) == ("low", "x3")]
    assert (low.x, low.y) == ((3.0,), (1.5,))
    assert (low.error_x.array, low.error_y.array) == (pytest.approx([2**0.5]), pytest.approx([0.5**0.5]))
    assert "broken" not in figure.to_json()


def test_settings_of_the_evaluation_that_a_sweep_does_not_use_are_named(caplog: pytest.LogCaptureFixture):
    given = EvaluationConfig(temperature=0.5, samples_per_prompt=4, pass_at=[2])
    for evaluation in (given, EvaluationConfig()):
        assert nodes.train_settings([], *[None] * 5, evaluation) == []
    assert [line.partition(" has no effect")[0] for line in caplog.messages if "no effect" in line] == [
        "evaluation.temperature=0.5",
        "evaluation.samples_per_prompt=4",
        "evaluation.pass_at=[2]",
    ]
