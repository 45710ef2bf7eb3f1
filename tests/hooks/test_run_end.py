"""The tags and the log line of a run that failed or was stopped."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from kedro.io import DatasetError

from ppo_rlhf.core.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    ModelError,
    PPORLHFError,
    RewardError,
    TrackingStoreError,
    TrainingError,
)
from ppo_rlhf.hooks.run_end import end_tags, resume_command, resume_hint
from ppo_rlhf.runtime.signals import as_error


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "ppo_checkpoints" / "run"
    for iteration in (10, 20, 30):
        (folder / f"iteration_{iteration:06d}").mkdir(parents=True)
    return folder


def test_the_newest_checkpoint_and_the_command_to_go_on(tmp_path: Path, checkpoints: Path):
    error = ZeroDivisionError("the update went wrong")
    assert end_tags(error, checkpoints, tmp_path) == {
        "error": "ZeroDivisionError: the update went wrong",
        "last_checkpoint": "data/ppo_checkpoints/run/iteration_000030",
    }
    assert resume_hint(error, checkpoints, tmp_path) == (
        "Last checkpoint: data/ppo_checkpoints/run/iteration_000030.\nTo resume: resume=latest among the parameters"
    )


def test_of_a_sweep_without_checkpoints_the_trainings_that_ended_are_what_is_kept(tmp_path: Path, checkpoints: Path):
    stopped, nothing = as_error(KeyboardInterrupt()), tmp_path / "nothing"
    assert "checkpoint" not in resume_hint(stopped, nothing, tmp_path, is_sweep=True)
    assert "no checkpoint yet" in resume_hint(stopped, nothing, tmp_path)
    for is_sweep in (False, True):
        assert "\nTo resume: resume=latest " in resume_hint(stopped, nothing, tmp_path, is_sweep=is_sweep)
    assert resume_hint(stopped, checkpoints, tmp_path, is_sweep=True).startswith("Last checkpoint: ")  # align,sweep


def test_after_divergence_it_is_the_newest_that_is_known_to_be_good(tmp_path: Path, checkpoints: Path):
    error = DivergenceError("the KL exploded", last_good_iteration=29)
    assert end_tags(error, checkpoints, tmp_path)["last_checkpoint"] == "data/ppo_checkpoints/run/iteration_000020"
    line = resume_hint(error, checkpoints, tmp_path)
    assert "data/ppo_checkpoints/run/iteration_000020. " in line
    at_once = resume_hint(DivergenceError("at once", last_good_iteration=0), checkpoints, tmp_path)
    assert at_once.startswith("No checkpoint ")
    assert "docs/resume.md" in line
    assert "docs/resume.md" in at_once


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError, TrainingError])
def test_no_command_to_go_on_is_named_where_the_same_input_would_fail_again(
    tmp_path: Path, checkpoints: Path, kind: type[PPORLHFError]
):
    wrapped = DatasetError("Failed while loading")
    wrapped.__cause__ = kind("what was given does not fit")
    for folder in (checkpoints, tmp_path / "nothing"):
        line = resume_hint(wrapped, folder, tmp_path)
        assert "docs/resume.md" in line
        assert "To resume" not in line
    for mended in (
        RewardError("raised"),
        TrackingStoreError("the server is gone"),
        as_error(SystemExit("from outside")),
    ):
        assert "To resume" in resume_hint(mended, checkpoints, tmp_path)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("run", "kedro run --params resume=latest"),
        ("run --env test --params a=1,resume=x", "kedro run --env test --params a=1,resume=latest"),
        ("run --params resume=latest", "kedro run --params resume=latest"),
        ("run --params 'resume=x, a=[1,2]'", "kedro run --params 'a=[1,2],resume=latest'"),
        ("run '--params=a=b c' --conf-source conf", "kedro run --params 'a=b c,resume=latest' --conf-source conf"),
        ("run --params a=1 --params b=2", "kedro run --params a=1 --params b=2,resume=latest"),  # the last one counts
        ("-f kernel.json", "resume=latest among the parameters"),  # a notebook
    ],
)
def test_the_command_to_go_on_is_what_was_typed_with_resume(typed: str, expected: str):
    for program in ("/bin/kedro", "python -m kedro"):  # what Kedro makes of the path of its `__main__`
        assert resume_command([program, *shlex.split(typed)]) == expected


def test_outside_of_a_project_the_command_to_go_on_is_ppo_rlhfs_as_it_was_typed():
    """`kedro` has no `run` there, where a wheel runs with `--conf-source`."""
    for program in ("/venv/bin/ppo_rlhf", "/venv/lib/ppo_rlhf/__main__.py"):
        typed = [program, "run", "--conf-source", "conf"]
        assert resume_command(typed) == "ppo_rlhf run --conf-source conf --params resume=latest"


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("/v/bin/python3 /v/bin/torchrun --nproc_per_node 2 -m kedro", "torchrun --nproc_per_node 2 -m kedro"),
        ("/v/bin/python3 -m torch.distributed.run -m kedro", "python3 -m torch.distributed.run -m kedro"),
        ("/bin/bash", "kedro"),
    ],
)
def test_the_command_to_go_on_on_several_processes_is_the_launchers(launcher: str, expected: str, monkeypatch):
    words = shlex.split(launcher) + (["run", "--env", "test"] if "kedro" in launcher else [])
    monkeypatch.setattr("psutil.Process", lambda _: SimpleNamespace(cmdline=lambda: words))
    monkeypatch.setenv("WORLD_SIZE", "2")
    typed = ["python -m kedro", "run", "--env", "test"]
    assert resume_command(typed) == f"{expected} run --env test --params resume=latest"
