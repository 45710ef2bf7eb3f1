"""`kedro run` and `ppo_rlhf run`: what they accept, and how they refuse."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from click.testing import Result
from kedro.io import DatasetError

from ppo_rlhf.cli import cli, run
from ppo_rlhf.cli.errors import one_line_each
from ppo_rlhf.core.errors import ConfigError
from tests.conftest import REPOSITORY

Kedro = Callable[..., Result]


def files_below(folder: Path) -> dict[str, int]:
    """Every file and its time of change, but for bytecode of the toy project itself."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def refused(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    """Run a command that must be refused, and return the lines it shows for it; nothing may have been written."""
    (project / "mlflow.db").unlink(missing_ok=True)
    before = files_below(project)
    result = kedro(project, "run", *arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    assert files_below(project) == before
    return [line for line in result.stderr.splitlines() if line.startswith("Error:")]


def runs(project: Path) -> list[mlflow.entities.Run]:
    mlflow.set_tracking_uri(f"sqlite:///{project / 'mlflow.db'}")
    return mlflow.search_runs(experiment_names=["ppo_rlhf"], output_format="list")


def test_run_is_kedros_own_command_except_for_the_default_runner():
    from kedro.framework.cli.project import run as kedro_run

    ours, theirs = ({option.name: option.default for option in command.params} for command in (run, kedro_run))
    assert ours == theirs | {"runner": "ppo_rlhf.runner.LoopRunner"}
    assert cli.commands["run"] is run


def test_kedro_run_loops_without_being_told_a_runner(kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert [m for m in caplog.messages if m.startswith("Iteration")][-1].startswith("Iteration 3/3")
    assert runs(toy_project)[0].info.status == "FINISHED"


def test_outside_a_project_the_command_says_where_to_go(tmp_path: Path):
    program = Path(sys.executable).with_name("ppo_rlhf")
    done = subprocess.run([program, "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"Error: {tmp_path} is not in a Kedro project: change to the folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--params", "ppo.kl_coeff=0.1"],
            ["Error: ppo.kl_coeff is not a parameter of this group. Did you mean `kl_coef`?"],
        ),
        (
            ["--params", "ppo.kl_coef=much,ppo.gamma=2"],
            [
                "Error: ppo.gamma=2: input should be less than or equal to 1",
                "Error: ppo.kl_coef='much': input should be a valid number, unable to parse string as a number",
            ],
        ),
        (
            ["--params", "ppo.num_mini_batches=3"],
            [
                "Error: ppo.batch_size=8 (per_device_train_batch_size 8 x gradient_accumulation_steps 1) is not a "
                "multiple of ppo.num_mini_batches=3; nearest sizes that are: 6, 9"
            ],
        ),
        (["--params", "sead=3"], ["Error: --params sead: nothing is called so. Did you mean `seed`?"]),
        (["--params", "kl_coef=0.3"], ["Error: --params kl_coef: nothing is called so. Did you mean `ppo.kl_coef`?"]),
        (
            ["--params", "qqq=1,promts_path=x"],
            [
                "Error: --params qqq: nothing is called so. Known are base_model_path, ppo, prompts, "
                "prompts_path, reward, seed, sft_model_path.",
                "Error: --params promts_path: nothing is called so. Did you mean `prompts_path`?",
            ],
        ),
        (
            ["--pipelines", "algin"],
            [
                "Error: Failed to find the pipeline named 'algin'. It needs to be generated and returned by the "
                "'register_pipelines' function. Did you mean one of these instead? align"
            ],
        ),
        (
            ["--to-nodes", "generate_rolouts"],
            ["Error: No node of this run is called generate_rolouts. Did you mean `ppo.generate_rollouts`?"],
        ),
        (
            ["--runner", "SequentialRunner"],
            [
                "Error: SequentialRunner would run PPO's loop once instead of until training is finished: drop "
                "--runner (in Python: the `runner` argument), then LoopRunner is used."
            ],
        ),
        (
            ["--runner", "ThreadRunner", "--pipelines", "ppo"],
            [
                "Error: ThreadRunner would run PPO's loop once instead of until training is finished: drop --runner "
                "(in Python: the `runner` argument), then LoopRunner is used."
            ],
        ),
        (
            ["--from-nodes", "ppo.score_responses"],
            [
                "Error: This run starts from ppo_config, rollouts, training_state, which no file holds: start from the "
                "nodes that make them (--from-nodes), or give each an entry with a file in conf/local/catalog.yml."
            ],
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_ends_with_one_line_a_problem_and_writes_nothing(
    kedro: Kedro, toy_project: Path, arguments: list[str], expected: list[str]
):
    assert sorted(refused(kedro, toy_project, *arguments)) == sorted(expected)


def test_an_unknown_runner_is_named(kedro: Kedro, toy_project: Path):
    (line,) = refused(kedro, toy_project, "--runner", "nowhere.Runner")
    assert line.startswith("Error: --runner nowhere.Runner: there is no such runner")


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("parameters.yml", "ppo:\n  kl_coef: [1\n", "Invalid YAML or JSON file"),
        ("parameters.yml", "ppo:\n  kl_coef: ${globals:nothing}\n", "Globals key 'nothing' not found"),
        ("catalog.yml", "raw_prompts:\n  type: no.such.Dataset\n  filepath: x\n", "no.such.Dataset"),
        ("mlflow.yml", "server:\n  tracking: x\n", "mlflow.yml: server.tracking='x': Extra inputs are not permitted"),
        (
            "parameters.yml",
            "ppo:\n\tkl_coef: 0.1\n",
            "parameters.yml, line 2, column 1: found character that cannot start any token (indent by spaces",
        ),
        (
            "parameters.yml",
            "ppo: [1, 2]\n",
            "Error: conf/local/parameters.yml: ppo is a list, but a mapping in conf/base. Write `name: value`, without "
            "`- `.",
        ),
        (
            "parameters.yml",
            "reward: {components: {type: function, function: a:b}}\n",
            "Error: conf/local/parameters.yml: reward.components is a mapping, but a list in conf/base. Write `- ` "
            "before each entry.",
        ),
        ("parameters.yml", "ppo: much\n", "Error: ppo: a mapping of settings (name: value) is expected, not str"),
        (
            "parameters.yml",
            "pppo: {kl_coef: 1}\n",
            "Error: conf/local/parameters.yml: nothing reads pppo here. Did you mean `ppo`?",
        ),
        (
            "parameters.yml",
            "kl_coef: 1\n",
            "Error: conf/local/parameters.yml: nothing reads kl_coef here. Did you mean `ppo.kl_coef`?",
        ),
        (
            "parameters.yml",
            "ppo.kl_coef: 1\n",
            "Error: conf/local/parameters.yml: nothing reads ppo.kl_coef here. Write `ppo:`, and below it, indented, "
            "`kl_coef: …`.",
        ),
        (
            "parameters.yml",
            "sft_model_path: x\n",
            "Error: conf/local/parameters.yml: nothing reads sft_model_path here. Move it to conf/local/globals.yml.",
        ),
        (
            "globals.yml",
            "sft_model: x\n",
            "Error: conf/local/globals.yml: nothing reads sft_model here. Did you mean `sft_model_path`?",
        ),
        (
            "globals.yml",
            "sft_model_path:x\n",  # no space: YAML takes it as one word
            "Error: conf/local/globals.yml: nothing reads sft_model_path:x here. Did you mean `sft_model_path`?",
        ),
    ],
    ids=[
        "broken YAML",
        "missing global",
        "unknown dataset class",
        "unknown key in mlflow.yml",
        "tab",
        "list for a group",
        "mapping for a list",
        "word for a group",
        "misspelt group",
        "setting outside its group",
        "dotted setting",
        "global among the parameters",
        "misspelt global",
        "no space behind the colon",
    ],
)
def test_a_mistake_in_a_configuration_file_is_one_line(
    kedro: Kedro, toy_project: Path, file: str, text: str, expected: str
):
    (toy_project / "conf" / "local" / file).write_text(text)
    (line,) = refused(kedro, toy_project)
    assert expected in line


def test_names_of_ones_own_that_configuration_refers_to_are_no_mistake(kedro: Kedro, toy_project: Path):
    local = toy_project / "conf" / "local"
    (local / "parameters.yml").write_text('_half: 0.5\nmine: 0.25\nppo: {kl_coef: "${mine}"}\n')
    (local / "globals.yml").write_text("my_data: data/01_raw\nprompts_path: ${my_data}/prompts.jsonl\n")
    result = kedro(toy_project, "run", "--pipelines", "ppo", "--to-nodes", "configure_ppo")
    assert result.exit_code == 0, result.output
    assert runs(toy_project)[0].data.params["ppo.kl_coef"] == "0.25"


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/p/data"), "/p/data: Permission denied."),
        (OSError(errno.ENOSPC, "No space left on device"), "pairs: No space left on device."),
    ],
)
def test_a_disk_that_is_full_or_forbidden_is_one_line(cause: OSError, expected: str):
    error = DatasetError("pairs: Failed while saving data to dataset ParquetDataset(…).")
    error.__cause__ = DatasetError("Failed while saving data to dataset ParquetDataset(…).")
    error.__cause__.__cause__ = cause
    assert one_line_each(error) == [expected]
    error.__cause__.__cause__ = OSError(errno.EIO, "Input/output error")
    assert one_line_each(error) is None


def test_params_that_cannot_be_parsed_are_one_line(kedro: Kedro, toy_project: Path):
    (line,) = refused(kedro, toy_project, "--params", "ppo.kl_coef=[1")
    assert "kl_coef" in line or "parsing" in line


def test_an_unexpected_exception_keeps_its_traceback(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY_FAIL_AT", "2")
    result = kedro(toy_project, "run", "--pipelines", "ppo")
    assert isinstance(result.exception, ZeroDivisionError)
    assert runs(toy_project)[0].info.status == "FAILED"


def test_a_bare_node_name_will_do_where_it_is_unique(kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        result = kedro(toy_project, "run", "--pipelines", "ppo", "--to-nodes", "generate_rollouts")
    assert result.exit_code == 0, result.output
    completed = {m.split(": ")[1].split(" (")[0] for m in caplog.messages if m.startswith("Completed node")}
    assert completed == {
        "ppo.configure_ppo",
        "ppo.read_prompts",
        "ppo.initialise_training_state",
        "ppo.generate_rollouts",
    }


def test_a_bare_name_of_two_nodes_is_refused(monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    import click

    from ppo_rlhf.cli import commands

    nodes = [SimpleNamespace(name="ppo.evaluate"), SimpleNamespace(name="evaluation.evaluate")]
    monkeypatch.setattr(commands, "pipelines", {"__default__": SimpleNamespace(nodes=nodes)})
    with pytest.raises(
        click.ClickException, match=r"Several nodes are called evaluate: evaluation\.evaluate, ppo\.evaluate"
    ):
        commands._full_names(["evaluate"], [None])
    assert commands._full_names(["ppo.evaluate"], [None]) == ["ppo.evaluate"]


def test_another_environment_says_which_personal_settings_it_leaves_unused(
    kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture
):
    (toy_project / "conf" / "local" / "parameters.yml").write_text("ppo: {kl_coef: 0.3}\n")
    kedro(toy_project, "run", "--env", "other", "--pipelines", "ppo")
    expected = "Environment other is used instead of conf/local: parameters.yml is not read."
    assert caplog.messages.count(expected) == 1
    caplog.clear()
    kedro(toy_project, "run", "--pipelines", "ppo", "--to-nodes", "configure_ppo")
    assert expected not in caplog.messages
    assert runs(toy_project)[0].data.params["ppo.kl_coef"] == "0.3"


@pytest.mark.parametrize(
    ("grace", "steps", "line"),
    [
        ("25", [1, 2], "SIGTERM: finishing iteration 2 (about 1 s) and saving it, then stopping"),
        ("0", [1], "SIGTERM: stopping now; until iteration 2 is saved it would take about 1 s"),
    ],
    ids=["time to finish", "no time"],
)
def test_a_signal_in_the_loop_ends_the_run_as_killed(toy_project: Path, grace: str, steps: list[int], line: str):
    done = subprocess.run(
        [
            Path(sys.executable).with_name("ppo_rlhf"),
            *("run", "--pipelines", "ppo", "--params", f"ppo.shutdown_grace_s={grace}"),
        ],
        cwd=toy_project / "data",  # the console script works in every folder of the project
        env=os.environ
        | {
            "TOY_SIGNAL_AT": "2:SIGTERM",
            "KEDRO_LOGGING_CONFIG": str(REPOSITORY / "conf" / "logging.yml"),
            "COLUMNS": "300",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 143, done.stderr
    assert "The run was stopped by SIGTERM." in done.stderr
    assert line in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (toy_project / "data" / "mlflow.db").exists()
    (killed,) = runs(toy_project)
    assert killed.info.status == "KILLED"
    logged = mlflow.MlflowClient().get_metric_history(killed.info.run_id, "objective/scores")
    assert [metric.step for metric in logged] == steps  # what the iterations measured is not lost
    saved = toy_project / "data" / "06_models" / "saved_iterations.txt"
    assert (saved.read_text().split() if saved.exists() else []) == [str(step) for step in steps if step == 2]


def test_a_notebooks_session_gets_the_loop_runner(
    toy_project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from kedro.framework.session import KedroSession
    from kedro.framework.startup import bootstrap_project

    monkeypatch.chdir(toy_project)
    bootstrap_project(toy_project)
    with caplog.at_level(logging.INFO), KedroSession.create(project_path=toy_project) as session:
        session.run(pipeline_names=["ppo"])
    assert any(message.startswith("Iteration 3/3") for message in caplog.messages)


def test_a_notebooks_session_shows_errors_as_exceptions(toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    from kedro.framework.session import KedroSession
    from kedro.framework.startup import bootstrap_project

    monkeypatch.chdir(toy_project)
    bootstrap_project(toy_project)
    with (
        KedroSession.create(project_path=toy_project, runtime_params={"sead": 3}) as session,
        pytest.raises(ConfigError, match="Did you mean `seed`"),
    ):
        session.run()
