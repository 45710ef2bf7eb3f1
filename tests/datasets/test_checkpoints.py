"""The catalog entries of a run's checkpoints and evaluations: one folder per MLflow run, pruned, written atomically."""

import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Node, Pipeline

from ppo_rlhf.checkpoints.files import checkpoint_iterations
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, project_error
from ppo_rlhf.datasets import checkpoints
from ppo_rlhf.datasets.checkpoints import CheckpointDataset, EvaluationLogDataset, run_directory
from ppo_rlhf.datasets.run_catalog import RunCatalog
from ppo_rlhf.ppo.checkpointer import Checkpointer
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.metrics_file import EVALUATION, METRICS, _metrics_of, metrics_of
from tests.bare_state import bare_state


@pytest.fixture(autouse=True)
def active_run(monkeypatch):
    """An active MLflow run named `run`, without a tracking server."""
    monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id="run")))


@pytest.fixture(autouse=True)
def written(monkeypatch):
    """Write an empty directory instead of a checkpoint; other tests check the content of checkpoints."""
    iterations = []

    def write(directory: Path, state) -> Path:
        target = directory / f"iteration_{state.progress.iteration:06d}"
        target.mkdir(parents=True)
        iterations.append(state.progress.iteration)
        return target

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    return iterations


def after(iteration: int, **settings) -> TrainingState:
    """The state after an iteration."""
    return bare_state(60, iteration, **{"save_interval": 10, "save_total_limit": 2, **settings})


def evaluation(iteration: int, score: float, kl: float = 1.0) -> dict[str, float]:
    return {"iteration": float(iteration), "eval/kl": kl, "eval/reward": -score, "eval/judge_score": score}


def saved_through(
    tmp_path, evaluations: dict[int, dict[str, float]], timed: tuple[int, ...] = (), **settings
) -> list[int]:
    """Run 60 iterations as the pipeline does: the checkpoint of an iteration is saved before its evaluation."""
    checkpoint, log = CheckpointDataset(str(tmp_path)), EvaluationLogDataset(str(tmp_path))
    state = after(0, **settings)
    checkpointer = Checkpointer(state.progress, tmp_path / "run", lambda: checkpoint.save(state))
    checkpointer._is_due_by_time = lambda: state.progress.iteration in timed  # type: ignore[method-assign]
    for iteration in range(1, 61):
        state.progress.iteration = iteration
        checkpointer.iteration_ended()
        log.save(evaluations.get(iteration, {}))
    return checkpoint_iterations(tmp_path / "run")


@pytest.mark.parametrize(
    ("iterations", "keep", "most"),
    [
        (60, 2, 4),
        (60, 5, 7),
        (10, 5, 2),
    ],  # the newest, the best, one being written
)
def test_a_run_has_as_many_checkpoints_at_once_as_are_counted(iterations, keep, most):
    config = PPOConfig(save_interval=10, save_total_limit=keep, save_interval_minutes=None)
    assert checkpoints.most_checkpoints(config, iterations) == most
    assert checkpoints.most_checkpoints(config, iterations, True) == most + 1  # the best at any KL, or the start


def test_with_checkpoints_by_time_each_iteration_may_be_saved():
    """The 6 newest and the best of 10 iterations would be 7; of 3 iterations, the 3 and one being written."""
    config = PPOConfig(save_interval=10, save_total_limit=5)
    assert [checkpoints.most_checkpoints(config, iterations) for iterations in (10, 3)] == [7, 4]


def test_a_checkpoint_by_time_counts_among_the_newest(tmp_path, written):
    assert saved_through(tmp_path, {}, timed=(41, 57)) == [57, 60]
    assert written == [10, 20, 30, 40, 41, 50, 57, 60]


@pytest.mark.parametrize(
    ("scores", "settings", "kept"),
    [
        ({}, {}, [50, 60]),
        ({10: 0.1, 20: 0.9, 30: 0.3, 40: 0.2, 50: 0.4}, {}, [20, 50, 60]),
        ({10: 0.2, 20: 0.9, 30: 0.1}, {"kl_alarm": 30.0}, [10, 50, 60]),  # the KL of iteration 20 is too high
        ({15: 0.9, 20: 0.2, 30: 0.1}, {"save_total_limit": 1}, [20, 60]),  # iteration 15 has no checkpoint
        ({15: 0.9, 20: 0.2, 30: 0.1}, {"save_total_limit": 1, "timed": (15,)}, [20, 60]),  # the clock asked for 15's
    ],
    ids=["newest", "best", "drifted", "not saved", "by time"],
)
def test_the_newest_and_the_best_evaluated_checkpoints_are_kept(tmp_path, scores, settings, kept):
    rows = {
        i: evaluation(i, score, kl=31.0 if "kl_alarm" in settings and i == 20 else 1.0) for i, score in scores.items()
    }
    assert saved_through(tmp_path, rows, **settings) == kept


def test_a_checkpoint_is_only_written(tmp_path):
    with pytest.raises(DatasetError, match="`resume_checkpoint`"):
        CheckpointDataset(str(tmp_path)).load()


def test_each_mlflow_run_has_a_directory_of_its_own(tmp_path, monkeypatch):
    CheckpointDataset(str(tmp_path)).save(after(10))
    monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=SimpleNamespace(run_id="other")))
    dataset = CheckpointDataset(str(tmp_path))
    assert not dataset.exists()
    for iteration in (20, 30, 40):
        dataset.save(after(iteration))
    assert checkpoint_iterations(tmp_path / "other") == [30, 40]
    assert checkpoint_iterations(tmp_path / "run") == [10]  # checkpoints of another run are never pruned


def test_a_process_without_an_mlflow_run_takes_its_id_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow, "active_run", lambda: None)
    monkeypatch.setenv("PPO_RLHF_RUN_ID", "of-main")
    monkeypatch.setenv("RANK", "1")
    assert run_directory(tmp_path) == tmp_path / "of-main"
    monkeypatch.setenv("RANK", "0")  # tracking is disabled; an earlier run set the variable
    assert re.fullmatch("untracked-[0-9a-f]{16}", run_directory(tmp_path).name)


@pytest.mark.slow
def test_runs_without_tracking_have_directories_of_their_own_also_in_containers_with_one_host_name(tmp_path):
    """A container has the process id 1 each time that it starts."""
    code = (
        "import os, platform; os.getpid, platform.node = lambda: 1, lambda: 'vm'\n"
        "from pathlib import Path; from ppo_rlhf.datasets.checkpoints import run_directory\n"
        "from ppo_rlhf.runtime.names import untracked\n"
        "print(run_directory(Path())); untracked.begin(); print(run_directory(Path()))"
    )
    printed = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(2)]
    assert len({name for names in printed for name in names}) == 4


def test_evaluations_are_appended_and_read_back_oldest_first(tmp_path):
    log = EvaluationLogDataset(str(tmp_path))
    assert log.load() == []
    assert not log.exists()
    error = "eval/win_rate_se"  # of a single prompt
    rows = [evaluation(10, 0.1), evaluation(20, 0.2) | {error: float("nan")}]
    for row in rows:
        log.save(row)
    assert log.exists()
    found = EvaluationLogDataset(str(tmp_path)).load()
    assert found[0] == rows[0]
    assert math.isnan(found[1].pop(error))
    assert found[1] == evaluation(20, 0.2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [METRICS]


@pytest.mark.parametrize("active", [None, SimpleNamespace(info=SimpleNamespace(run_id="of the notebook"))])
def test_a_notebook_reads_the_run_that_it_names(tmp_path, monkeypatch, active):
    """Outside a run the log read as empty, though its file was there; then so in a notebook with a run of its own."""
    log = EvaluationLogDataset(str(tmp_path))
    log.save(evaluation(10, 0.1))
    monkeypatch.setattr("mlflow.active_run", lambda: active)
    assert EvaluationLogDataset(str(tmp_path / "run")).load() == log.load() == [evaluation(10, 0.1)]
    assert log.exists()
    metrics_of(tmp_path / "other").append(EVALUATION, 20, evaluation(20, 0.2))
    assert not EvaluationLogDataset(str(tmp_path)).exists()  # the description of a third run asks before it is active
    with pytest.raises(DatasetError, match="give the directory of one: other, run"):
        log.load()
    assert EvaluationLogDataset(str(tmp_path / "other")).load() == [evaluation(20, 0.2)]


def test_a_run_reads_no_evaluations_of_other_runs(tmp_path, monkeypatch):
    """An untracked run has no directory before its first checkpoint, and read the evaluations of the only other run."""
    monkeypatch.setattr("mlflow.active_run", lambda: None)
    metrics_of(tmp_path / "other").append(EVALUATION, 20, evaluation(20, 0.2))
    pipeline = Pipeline([Node(lambda rows: rows, "evaluation_metrics", "rows", name="n")])
    catalog = RunCatalog(DataCatalog({"evaluation_metrics": EvaluationLogDataset(str(tmp_path))}), pipeline)
    assert catalog.load("evaluation_metrics") == []


def test_a_damaged_log_of_evaluations_is_named_and_left_as_it_is_and_no_checkpoint_is_deleted(tmp_path):
    """If a damaged file counted as empty, the best checkpoint would be pruned like any other."""
    rows = {10: evaluation(10, 0.9), 20: evaluation(20, 0.1)}
    saved = saved_through(tmp_path, rows)
    damaged = tmp_path / "run" / METRICS
    whole = damaged.read_bytes()
    damaged.write_bytes(whole.replace(b'"eval/judge_score": 0.9', b'"eval/judge_score": 0.8'))
    assert damaged.read_bytes() != whole
    found = damaged.read_bytes()
    for attempt in (
        lambda: EvaluationLogDataset(str(tmp_path)).load(),
        lambda: EvaluationLogDataset(str(tmp_path)).save(evaluation(70, 0.5)),
        lambda: CheckpointDataset(str(tmp_path)).save(after(70)),
    ):
        _metrics_of.cache_clear()  # as in a process that goes on
        with pytest.raises(DatasetError) as caught:
            attempt()
        error = project_error(caught.value)
        assert isinstance(error, CheckpointError)
        assert str(error).startswith(f"{damaged}: damaged behind byte 0 (")
    assert damaged.read_bytes() == found
    assert checkpoint_iterations(tmp_path / "run") == [*saved, 70]


def test_an_iteration_without_evaluation_changes_nothing(tmp_path):
    log = EvaluationLogDataset(str(tmp_path))
    log.save({})
    assert not list(tmp_path.iterdir())


def test_a_second_evaluation_of_an_iteration_replaces_the_first(tmp_path):
    log = EvaluationLogDataset(str(tmp_path))
    for row in (evaluation(10, 0.1), evaluation(10, 0.5)):
        log.save(row)
    assert log.load() == [evaluation(10, 0.5)]


def test_a_failure_while_logging_an_evaluation_leaves_the_earlier_ones(tmp_path, monkeypatch):
    log = EvaluationLogDataset(str(tmp_path))
    log.save(evaluation(10, 0.1))

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(DatasetError):
        log.save(evaluation(20, 0.2))
    monkeypatch.undo()
    _metrics_of.cache_clear()
    assert EvaluationLogDataset(str(tmp_path / "run")).load() == [evaluation(10, 0.1)]


@pytest.mark.parametrize("name", ["CheckpointDataset", "EvaluationLogDataset"])
def test_both_are_made_from_a_catalog_entry_with_metadata(tmp_path, name):
    entry = {"type": f"ppo_rlhf.datasets.{name}", "filepath": str(tmp_path), "metadata": {"kedro-viz": {"layer": "x"}}}
    dataset = DataCatalog.from_config({"entry": entry})["entry"]
    assert type(dataset).__name__ == name
    assert dataset.metadata == {"kedro-viz": {"layer": "x"}}
    assert str(tmp_path) in repr(dataset)
