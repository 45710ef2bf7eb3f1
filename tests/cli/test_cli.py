"""`kedro run` and `ppo_rlhf run`: the options and node names that they take, and the errors that they show."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner, Result
from kedro.config import OmegaConfigLoader
from kedro.framework.cli.cli import KedroCLI
from kedro.framework.cli.project import run as kedro_run
from kedro.io import DatasetError
from kedro.validation import ParameterValidationError
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

from ppo_rlhf.cli import cli, errors, run
from ppo_rlhf.cli.errors import one_line_each
from tests.conftest import REPOSITORY

Kedro = Callable[..., Result]

PROGRAM = Path(sys.executable).with_name("ppo_rlhf")
QUIET = {"KEDRO_LOGGING_CONFIG": str(REPOSITORY / "conf" / "logging.yml")}


def files_below(folder: Path) -> dict[str, int]:
    """The modification time of each file, except bytecode and the cache of tables."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", "02_intermediate"} & set(path.parts)
    }


def refused(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    """Run a command that must be refused; check that it wrote nothing, and return its error lines."""
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
    ours, theirs = ({option.name: option.default for option in command.params} for command in (run, kedro_run))
    assert ours == theirs | {"runner": "ppo_rlhf.runner.LoopRunner"}
    assert cli.commands["run"] is run


def test_help_lists_run_once(toy_project: Path):
    listed = CliRunner().invoke(KedroCLI(toy_project), ["--help"], standalone_mode=False)
    assert listed.stdout.count("\n  run ") == 1, listed.output
    assert "\n  registry " in listed.stdout  # beside Kedro's other commands


@pytest.mark.slow
def test_kedro_run_loops_without_being_told_a_runner(kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        result = kedro(toy_project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    assert [m for m in caplog.messages if m.startswith("Iteration")][-1].startswith("Iteration 3/3")
    assert runs(toy_project)[0].info.status == "FINISHED"


@pytest.mark.slow
def test_the_version_that_is_named_is_read_and_recorded(kedro: Kedro, toy_project: Path):
    for _ in range(2):
        assert kedro(toy_project, "run", "--pipelines", "ppo").exit_code == 0
    older, _ = sorted((toy_project / "data" / "06_models" / "ppo_policy").iterdir())
    result = kedro(toy_project, "run", "--pipelines", "evaluation", "--load-versions", f"ppo_policy:{older.name}")
    assert result.exit_code == 0, result.output
    assert runs(toy_project)[0].data.tags["data.ppo_policy.path"] == str(older)


def test_outside_a_project_the_command_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(cli, ["run"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"Error: {tmp_path} is not in a Kedro project")


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--params", "ppo.kl_coef=much,ppo.gamma=2"], ["ppo.gamma=2", "ppo.kl_coef='much'"]),
        (["--pipelines", "supervised_finetuning", "--params", "ppo.kl_coef=0.1,prompts_path=x"], ["kl_coef", "_path"]),
        (["--to-nodes", "generate_rolouts"], ["`generate_rollouts`"]),
        (["--pipelines", "evaluation", "--load-versions", "ppo_policy:2020"], ["ppo_policy/2020"]),
        (["--from-nodes", "ppo.score_responses"], ["rollouts"]),
        slow(["--params", "ppo.kl_coeff=0.1"], ["`kl_coef`"]),
        slow(["--params", "ppo.kl_coef=[1"], ["parsing"]),
        slow(["--params", "sead=3"], ["`seed`"]),
        slow(["--pipelines", "algin"], ["align"]),
        slow(["--runner", "SequentialRunner"], ["--runner"]),
        (["--runner", "no.such.Runner"], ["--runner no.such.Runner: No module named 'no'"]),
        slow(["--runner", "LopRunner"], ["--runner LopRunner: "]),
        slow(["--pipelines", "supervised_finetuning", "--load-versions", "raw_prompts:2020"], ["raw_prompts: "]),
        slow(["--load-versions", "ppo_polcy:2020"], ["ppo_polcy"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_options_end_with_one_line_a_problem_and_nothing_is_written(
    kedro: Kedro, toy_project: Path, arguments: list[str], named: list[str]
):
    lines = refused(kedro, toy_project, *arguments)
    assert len(lines) == len(named)
    assert all(name in line for name, line in zip(named, sorted(lines), strict=True))


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("parameters.yml", "ppo:\n  kl_coef: [1\n", "line 2"),
        slow("parameters.yml", "ppo:\n\tkl_coef: 0.1\n", "line 2"),
        slow("parameters.yml", "ppo:\n  kl_coef: ${globals:nothing}\n", "'nothing'"),
        slow("parameters.yml", "ppo: much\n", "ppo"),
        slow("catalog.yml", "raw_prompts:\n  type: no.such.Dataset\n  filepath: x\n", "no.such.Dataset"),
        ("mlflow.yml", "server:\n  tracking: x\n", "server.tracking"),
    ],
    ids=["broken YAML", "tab", "missing global", "word for a group", "unknown dataset class", "unknown key for MLflow"],
)
def test_a_mistake_in_a_configuration_file_is_one_line(
    kedro: Kedro, toy_project: Path, file: str, text: str, named: str
):
    (toy_project / "conf" / "local" / file).write_text(text)
    (line,) = refused(kedro, toy_project)
    assert named in line


def test_letters_that_the_locale_does_not_have_are_refused_in_one_line(kedro: Kedro, toy_project: Path):
    typed = "prompts_path=gr\udcc3\udcb6\udcc3\udc9fe.jsonl"  # Python decodes UTF-8 so if the locale is ASCII
    result = kedro(toy_project, "run", "--params", typed)
    assert result.exit_code == 1
    assert re.search(r"Error: prompts_path=größe\.jsonl: .* utf-8, .*PYTHONUTF8=1\.", result.stderr)


def test_a_full_disk_is_one_line_and_an_unexpected_error_none():
    saving = "sft_policy: Failed while saving data to dataset ppo_rlhf.datasets.Model(filepath='/p/sft')"
    error = DatasetError(f"{saving}.\nNo space")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert one_line_each(error) == [f"{saving}: [Errno 28] No space left on device"]
    error.__cause__ = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert one_line_each(error) == [f"{saving}: {error.__cause__}"]
    error.__cause__ = TypeError("a mistake of ours")
    assert one_line_each(error) is None
    assert one_line_each(ValueError("a mistake of ours")) is None


@pytest.mark.parametrize(
    ("file", "text", "kind", "line"),
    [
        (
            "base/globals.yml",
            "# inputs\nprompts_path: ${oc.env:PROMPTS} # training",
            "globals",
            "conf/base/globals.yml, line 2: prompts_path: ${oc.env:PROMPTS}: Kedro reads environment variables only in "
            "credentials.yml. Write the value, or give a parameter's value with --params.",
        ),
        (
            "local/parameters.yml",
            'ppo: {seed: 1, kl_coef: "${oc.env:X,0.1}"}',
            "parameters",
            'conf/local/parameters.yml, line 1: kl_coef: "${oc.env:X,0.1}"}: Kedro reads environment variables only',
        ),
        (
            "base/globals.yml",
            "prompts_path: ${nothing}",
            "globals",
            "conf/base/globals.yml, line 1: prompts_path: ${nothing}: Interpolation key 'nothing' not found.",
        ),
    ],
)
def test_a_setting_that_refers_to_nothing_is_one_line_with_its_file(tmp_path, monkeypatch, file, text, kind, line):
    (tmp_path / "pyproject.toml").write_text('[tool.kedro]\npackage_name = "a"\n')
    for folder in ("base", "local"):
        (tmp_path / "conf" / folder).mkdir(parents=True)
        (tmp_path / "conf" / folder / "parameters.yml").write_text("seed: 1")
    (tmp_path / "conf" / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OmegaConfBaseException) as caught:
        OmegaConfigLoader("conf", base_env="base", default_run_env="local")[kind]
    (shown,) = one_line_each(caught.value) or []
    assert shown.startswith(line)


def test_a_bad_value_of_a_setting_that_many_groups_have_is_one_line():
    rule = "input should be a valid integer, unable to parse string as an integer"
    lines = [f"ppo.seed='abc': {rule}", "ppo.kl_coef=-1: input should be at least 0", f"prompts.seed='abc': {rule}"]
    kedros = [
        f"- Parameter '{line.partition('.')[0]}': Failed to instantiate X for parameter 'y': {line}" for line in lines
    ]
    error = ParameterValidationError("\n".join(["Parameter validation failed:", *kedros]))
    assert one_line_each(error) == [f"seed='abc': {rule} (of ppo, prompts)", lines[1]]


def test_a_bare_node_name_is_enough(kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        result = kedro(toy_project, "run", "--pipelines", "ppo", "--to-nodes", "configure_ppo")
    assert result.exit_code == 0, result.output
    completed = {m.split(": ")[1].split(" (")[0] for m in caplog.messages if m.startswith("Completed node")}
    assert completed == {"ppo.configure_ppo"}


def test_a_list_is_written_in_brackets_on_the_command_line_too():
    name = ["--params", "evaluation.pass_at=[1,2],evaluation.samples_per_prompt=4,seed=3"]
    context = run.make_context("run", name)
    assert context.params["params"] == {"evaluation": {"pass_at": [1, 2], "samples_per_prompt": 4}, "seed": 3}
    assert run.make_context("run", ["--params", "a=[],b=[7]"]).params["params"] == {"a": [], "b": [7]}


@pytest.mark.slow
def test_kedros_catalog_commands_show_a_wrong_parameter_in_the_line_of_a_run(kedro: Kedro, toy_project: Path):
    (toy_project / "conf" / "local" / "parameters.yml").write_text("ppo: {kl_coeff: 0.3}\n")
    result = kedro(toy_project, "catalog", "describe-datasets")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ppo.kl_coeff")
    assert [line] == refused(kedro, toy_project)


@pytest.mark.slow
def test_a_signal_in_the_loop_ends_the_run_as_killed(toy_project: Path):
    done = subprocess.run(
        [PROGRAM, "run", "--pipelines", "ppo"],
        cwd=toy_project / "data",  # the console script works in every folder of the project
        env=os.environ | QUIET | {"TOY_SIGNAL_AT": "2:SIGTERM"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "The run was stopped by SIGTERM." in done.stderr
    assert "Traceback" not in done.stderr
    assert not (toy_project / "data" / "mlflow.db").exists()
    (killed,) = runs(toy_project)
    assert killed.info.status == "KILLED"
    logged = mlflow.MlflowClient().get_metric_history(killed.info.run_id, "objective/scores")
    assert [metric.step for metric in logged] == [
        1,
        2,
    ]  # the interrupted iteration was finished and logged


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_is_killed_and_says_so(toy_project: Path):
    """`kedro run | head -1` must not end as FINISHED in MLflow."""
    running = subprocess.Popen(
        [PROGRAM, "run", "--pipelines", "align"],
        cwd=toy_project,
        env=os.environ | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    running.stdout.readline()
    running.stdout.close()
    assert running.stderr is not None
    why = "The run was stopped by SIGPIPE: nobody reads its output any more."
    assert running.stderr.read() == f"{why}\n"
    assert running.wait(60) == 128 + signal.SIGPIPE
    (killed,) = runs(toy_project)
    assert killed.info.status == "KILLED"
    assert killed.data.tags["error"] == f"RunInterruptedError: {why}"


# --- several processes -----------------------------------------------------------------------------------------------


def test_an_error_of_another_process_alone_is_shown_with_its_number(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(errors, "MAIN_PROCESS_FAILS_WITHIN_S", 0.0)
    (line,) = refused(kedro, toy_project, "--params", "ppo.kl_coeff=0.1")
    assert line.startswith("Error: process 1: ppo.kl_coeff")


@pytest.mark.slow
def test_an_error_of_all_processes_is_shown_once_and_ends_them(toy_project: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "kedro"]
    done = subprocess.run(
        [*launch, "run", "--params", "ppo.kl_coeff=0.1"],
        cwd=toy_project,
        env=os.environ | QUIET | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("ppo.kl_coeff") == 1


def test_another_environment_says_which_personal_settings_it_leaves_unused(
    kedro: Kedro, toy_project: Path, caplog: pytest.LogCaptureFixture
):
    (toy_project / "conf" / "local" / "parameters.yml").write_text("ppo: {kl_coef: 0.3}\n")
    kedro(toy_project, "run", "--env", "other", "--pipelines", "ppo", "--to-nodes", "configure_ppo")
    assert any(re.search(r"other .* conf/local.* parameters\.yml", message) for message in caplog.messages)
