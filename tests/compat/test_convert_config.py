"""`kedro convert-config`: what it reads, writes, prints and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from ppo_rlhf.cli import cli
from ppo_rlhf.compat import from_deepspeed_chat, from_trl
from tests.compat.deepspeed_source import DEEPSPEED_SCRIPT
from tests.compat.trl_source import LEGACY_SCRIPT

Kedro = Callable[..., Result]


@pytest.fixture
def convert(kedro: Kedro, project: Path) -> Callable[..., Result]:
    """Run the command in a copy of the project."""
    return lambda *arguments: kedro(project, "convert-config", *arguments)


@pytest.fixture
def legacy_file(tmp_path: Path) -> Path:
    file = tmp_path / "legacy.yaml"
    file.write_text(yaml.safe_dump(LEGACY_SCRIPT))
    return file


def written(project: Path) -> dict[str, object]:
    local = project / "conf" / "local"
    return {
        k: v
        for name in ("parameters", "globals")
        for k, v in yaml.safe_load((local / f"{name}.yml").read_text()).items()
    }


def test_a_file_of_trl_becomes_the_two_files_of_conf_local(
    convert: Callable[..., Result], project: Path, legacy_file: Path
):
    result = convert("--from", "trl", str(legacy_file))
    assert result.exit_code == 0, result.output
    assert written(project) == from_trl(LEGACY_SCRIPT).parameters
    lines = result.stderr.splitlines()
    assert "Carried over: 10 settings. Not carried over: 3." in lines
    assert "  target_kl: early_stopping=False: TRL does not read it." in lines
    assert lines[-1] == "Run it: kedro run --pipelines align"
    assert result.stdout == ""


def test_json_is_read_too(convert: Callable[..., Result], project: Path, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kl_coef": 0.1, "total_episodes": 64}))
    assert convert("--from", "trl", str(file)).exit_code == 0
    assert written(project) == from_trl({"kl_coef": 0.1, "total_episodes": 64}).parameters


@pytest.mark.parametrize("how", ["script", "one word", "words"])
def test_a_command_of_deepspeed_chat_is_read_from_a_script_a_text_or_the_words_themselves(
    convert: Callable[..., Result], project: Path, tmp_path: Path, how: str
):
    command = "deepspeed --num_gpus 1 main.py --actor_model_name_or_path a --critic_model_name_or_path b --ppo_epochs 2"
    if how == "script":
        (tmp_path / "run.sh").write_text(DEEPSPEED_SCRIPT)
        source, expected = [str(tmp_path / "run.sh")], from_deepspeed_chat(DEEPSPEED_SCRIPT, num_prompts=640)
    else:
        source = ["--", command] if how == "one word" else ["--", *command.split()]
        expected = from_deepspeed_chat(command, num_prompts=640)
    result = convert("--from", "deepspeed-chat", "--prompts", "640", *source)
    assert result.exit_code == 0, result.output
    assert written(project) == expected.parameters


def test_a_script_whose_path_has_a_space_is_read(convert: Callable[..., Result], project: Path, tmp_path: Path):
    script = tmp_path / "My Project" / "run.sh"
    script.parent.mkdir()
    script.write_text(DEEPSPEED_SCRIPT)
    assert convert("--from", "deepspeed-chat", str(script)).exit_code == 0
    assert written(project) == from_deepspeed_chat(DEEPSPEED_SCRIPT).parameters


def test_a_command_may_be_longer_than_the_name_of_a_file(convert: Callable[..., Result], project: Path):
    command = f"deepspeed main.py --ppo_epochs 3 --actor_model_name_or_path {'x' * 300}"
    result = convert("--from", "deepspeed-chat", "--", command)
    assert result.exit_code == 0, result.output
    assert written(project) == from_deepspeed_chat(command).parameters


def test_a_path_with_a_space_that_leads_nowhere_is_refused(convert: Callable[..., Result], project: Path):
    refused = convert("--from", "deepspeed-chat", "My Project/run.sh")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines() == [
        "Error: My Project/run.sh: neither main.py nor an option is in it. Give a step-3 command, or a file that "
        "exists and holds one."
    ]
    assert list((project / "conf" / "local").iterdir()) == []


def test_a_dash_prints_the_parameters_and_writes_nothing(
    convert: Callable[..., Result], project: Path, legacy_file: Path
):
    result = convert("--from", "trl", "--to", "-", str(legacy_file))
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == from_trl(LEGACY_SCRIPT).parameters
    assert list((project / "conf" / "local").iterdir()) == []
    assert "Not carried over: 3" in result.stderr


def test_another_file_is_written_with_its_globals_beside_it(
    convert: Callable[..., Result], project: Path, legacy_file: Path
):
    assert convert("--from", "trl", "--to", "conf/mine/parameters_ppo.yml", str(legacy_file)).exit_code == 0
    assert sorted(path.name for path in (project / "conf" / "mine").iterdir()) == ["globals.yml", "parameters_ppo.yml"]


def test_the_file_of_the_globals_is_not_taken_for_that_of_the_parameters(
    convert: Callable[..., Result], project: Path, legacy_file: Path
):
    refused = convert("--from", "trl", "--to", "conf/mine/globals.yml", str(legacy_file))
    expected = "name the file for parameters, parameters.yml; globals.yml is written beside it."
    assert refused.stderr.splitlines() == [f"Error: --to conf/mine/globals.yml: {expected}"]
    assert not (project / "conf" / "mine").exists()


def test_files_that_are_there_are_replaced_only_by_force(
    convert: Callable[..., Result], project: Path, legacy_file: Path
):
    own = project / "conf" / "local" / "globals.yml"
    own.write_text("seed: 7\n")
    refused = convert("--from", "trl", str(legacy_file))
    assert refused.exit_code == 1
    assert refused.stderr.splitlines() == [
        f"Error: {own} is there already: give --force to replace, or --to another file, or --to - to print."
    ]
    assert own.read_text() == "seed: 7\n"
    assert not own.with_name("parameters.yml").exists()
    assert convert("--from", "trl", "--force", str(legacy_file)).exit_code == 0
    assert written(project) == from_trl(LEGACY_SCRIPT).parameters


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("kl_coef: [", "config.yaml", "cannot be read: while parsing"),
        ("{", "config.json", "cannot be read: Expecting property name"),
        ("- kl_coef", "config.yaml", "holds no settings: a mapping (name: value) is expected."),
        (None, "config.yaml", "No such file or directory. Give a file that can be read."),
        ("{ppo_epochs: 4, kl_coef: 0.1}", "config.yaml", "ppo_epochs belongs to TRL's legacy PPOConfig and kl_coef to"),
        ("{batch_size: 10, mini_batch_size: 4}", "config.yaml", "batch_size=10 is not a multiple of mini_batch_size=4"),
        (
            "{per_device_train_batch_size: 4, num_mini_batches: 3}",
            "config.yaml",
            "ppo.batch_size=4 (per_device_train_batch_size 4 x gradient_accumulation_steps 1) is not a multiple of "
            "ppo.num_mini_batches=3",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_writes_nothing(
    convert: Callable[..., Result], project: Path, tmp_path: Path, text: str | None, name: str, expected: str
):
    if text is not None:
        (tmp_path / name).write_text(text)
    result = convert("--from", "trl", str(tmp_path / name))
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert expected in lines[0]
    assert "Traceback" not in result.output
    assert list((project / "conf" / "local").iterdir()) == []


def test_outside_a_project_it_asks_where_to_write(tmp_path: Path, legacy_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    command = ["convert-config", "--from", "trl", str(legacy_file)]
    refused = CliRunner().invoke(cli, command)
    assert refused.exit_code == 1
    assert "is not in a Kedro project: change to it, or say where to write with --to." in refused.stderr
    assert CliRunner().invoke(cli, [*command, "--to", "-"]).exit_code == 0
