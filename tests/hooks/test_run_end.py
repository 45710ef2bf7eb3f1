"""What is said of a run that did not end well."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from ppo_rlhf.core.errors import DivergenceError
from ppo_rlhf.hooks.run_end import end_tags, resume_command, way_to_go_on


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "ppo_checkpoints" / "run"
    for iteration in (10, 20, 30):
        (folder / f"iteration_{iteration:06d}").mkdir(parents=True)
    return folder


def run_params(project: Path, **given: Any) -> dict[str, Any]:
    return {"project_path": str(project), "env": None, "pipeline_names": None, "runtime_params": {}, **given}


def test_the_newest_checkpoint_and_the_command_to_go_on(tmp_path: Path, checkpoints: Path):
    error = ZeroDivisionError("the update went wrong")
    assert end_tags(error, checkpoints, tmp_path) == {
        "error": "ZeroDivisionError: the update went wrong",
        "last_checkpoint": "data/ppo_checkpoints/run/iteration_000030",
    }
    assert way_to_go_on(error, checkpoints, run_params(tmp_path, env="test")) == (
        "Last checkpoint: data/ppo_checkpoints/run/iteration_000030. "
        "To go on: kedro run --env test --params resume=latest"
    )


def test_after_divergence_it_is_the_newest_that_is_known_to_be_good(tmp_path: Path, checkpoints: Path):
    error = DivergenceError("the KL exploded", last_good_iteration=29)
    assert end_tags(error, checkpoints, tmp_path)["last_checkpoint"] == "data/ppo_checkpoints/run/iteration_000020"
    line = way_to_go_on(error, checkpoints, run_params(tmp_path))
    assert line.startswith("Last good checkpoint: data/ppo_checkpoints/run/iteration_000020. With the same settings")


def test_after_divergence_without_a_good_checkpoint_no_command_is_given_that_would_diverge_again(
    tmp_path: Path, checkpoints: Path
):
    error = DivergenceError("at once", last_good_iteration=0)
    assert "last_checkpoint" not in end_tags(error, checkpoints, tmp_path)
    assert way_to_go_on(error, checkpoints, run_params(tmp_path)) == (
        "No checkpoint is known to be good. With the same settings training would diverge again."
    )


def test_after_divergence_a_policy_is_named_as_one_to_start_from_only_if_it_is_a_whole_model(
    tmp_path: Path, checkpoints: Path
):
    error = DivergenceError("the KL exploded", last_good_iteration=29)
    policy = checkpoints / "iteration_000020" / "policy"
    named = policy.relative_to(tmp_path)
    line = way_to_go_on(error, checkpoints, run_params(tmp_path))
    assert line.endswith(f"; a new run can start from its policy, sft_model_path={named} with --pipelines align.")
    policy.mkdir()
    (policy / "adapter_config.json").write_text("{}")
    line = way_to_go_on(error, checkpoints, run_params(tmp_path))
    assert f"; a new run can start from its policy: merge the LoRA adapter {named} into its base, as docs/" in line
    assert f"sft_model_path={named}" not in line


def test_without_a_checkpoint_the_run_still_can_go_on(tmp_path: Path):
    error = ZeroDivisionError("early")
    assert end_tags(error, tmp_path / "nothing", tmp_path) == {"error": "ZeroDivisionError: early"}
    assert end_tags(error, None, tmp_path) == {"error": "ZeroDivisionError: early"}
    assert way_to_go_on(error, tmp_path / "nothing", run_params(tmp_path)) == (
        "There is no checkpoint yet. To go on: kedro run --params resume=latest"
    )


@pytest.mark.parametrize(
    ("source", "expected"), [(None, ""), ("/home/me/my conf", " --conf-source '/home/me/my conf'")]
)
def test_the_command_has_the_conf_source_that_was_typed(tmp_path: Path, source: str | None, expected: str):
    typed = click.Context(click.Command("run"))
    typed.params = {"conf_source": source}
    with typed:
        line = way_to_go_on(ZeroDivisionError("early"), tmp_path / "nothing", run_params(tmp_path))
    assert line == f"There is no checkpoint yet. To go on: kedro run --params resume=latest{expected}"


def test_the_command_repeats_what_was_typed(tmp_path: Path):
    params = run_params(
        tmp_path,
        env="test",
        pipeline_names=["ppo", "evaluation"],
        from_nodes=["ppo.configure_ppo"],
        runtime_params={"ppo": {"kl_coef": 0.1, "kl_stop": None}, "prompts_path": "my prompts.txt", "resume": "abc"},
    )
    command = resume_command(params)
    assert shlex.split(command) == [
        *("kedro", "run", "--env", "test", "--pipelines", "ppo,evaluation", "--from-nodes", "ppo.configure_ppo"),
        *("--params", "ppo.kl_coef=0.1,ppo.kl_stop=null,prompts_path=my prompts.txt,resume=latest"),
    ]
