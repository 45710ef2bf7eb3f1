"""`kedro convert-config` for several files and for tables: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ppo_rlhf.cli import cli
from ppo_rlhf.compat import from_llamafactory

PPO = {"stage": "ppo", "model_name_or_path": "org/base", "reward_model": "org/reward", "dataset": "questions"}
PPO |= {"per_device_train_batch_size": 1, "num_train_epochs": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder that is not in a project, with LLaMA-Factory's files of three stages and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [{"instruction": "é", "input": "", "output": "a"}] * 3
    (tmp_path / "data" / "questions.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "dataset_info.json").write_text('{"questions": {"file_name": "questions.json"}}')
    stages: dict[str, Any] = {"ppo": PPO, "sft": {"model_name_or_path": "org/base"}, "rm": {"stage": "rm"}}
    for name, settings in stages.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def convert(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["convert-config", "--from", *arguments])


def test_tables_are_written_beside_the_files_that_name_them(folder: Path):
    result = convert("llamafactory", "--to", "out/parameters.yml", "ppo.yaml")
    assert result.exit_code == 0, result.output
    file = folder / "out" / "llamafactory_prompts.jsonl"
    row = {"prompt": [{"role": "user", "content": "é"}], "response": "a"}
    assert [json.loads(line) for line in file.read_text().splitlines()] == [row] * 3
    assert yaml.safe_load((folder / "out" / "globals.yml").read_text())["prompts_path"] == str(file)
    assert yaml.safe_load((folder / "out" / "parameters.yml").read_text())["ppo"]["total_episodes"] == 3
    for name in ("parameters.yml", "globals.yml"):
        (folder / "out" / name).unlink()
    refused = convert("llamafactory", "--to", "out/parameters.yml", "ppo.yaml")
    assert refused.exit_code == 1
    assert f"Already there: {file}" in refused.stderr


def test_tables_are_not_printed_and_a_line_says_so(folder: Path):
    printed = convert("llamafactory", "--to", "-", "ppo.yaml")
    assert f"Not printed: {folder / 'llamafactory_prompts.jsonl'}." in printed.stderr
    assert not list(folder.glob("**/*.jsonl"))
    written = convert("llamafactory", "--to", "parameters.yml", "ppo.yaml")
    files = [(folder / name).read_text() for name in ("parameters.yml", "globals.yml")]
    assert printed.stdout == "\n".join(files)
    assert "Read: questions: 3 of 3 rows." in written.stderr
    assert "Fill in" not in printed.stderr


@pytest.mark.parametrize(
    ("files", "command", "sources"),
    [
        (["ppo"], "kedro run --pipelines align", 1),
        (["rm", "ppo"], "kedro run --pipelines reward_modelling,align", 2),
        (["ppo", "sft"], "kedro run --pipelines data_preparation,supervised_finetuning,align", 2),
        (["sft"], "kedro run --pipelines data_preparation,supervised_finetuning", 1),
        (["sft", "rm", "ppo"], "kedro run", 3),
    ],
)
def test_the_last_line_runs_what_was_converted(folder: Path, files: list[str], command: str, sources: int):
    result = convert("llamafactory", "--to", "parameters.yml", *(f"{name}.yaml" for name in files))
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == f"Then: {command}"
    assert result.stderr.count("Carried over:") == sources
    assert result.stderr.count("From LLaMA-Factory's stage") == (sources if sources > 1 else 0)
    written = yaml.safe_load((folder / "globals.yml").read_text())
    assert ("sft_model_path" in written, "reward_model_path" in written) == (
        "ppo" in files and "sft" not in files,
        "ppo" in files and "rm" not in files,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llamafactory", "ppo.yaml", "ppo.yaml"], "stage=ppo"),
        (["trl", "ppo.yaml", "sft.yaml"], "trl has all settings in one file, but 2 files are given"),
        (["ms-swift", "absent.sh"], "absent.sh cannot be read"),
        (["ms-swift", "sft.yaml"], "rlhf_type='dpo' has no counterpart"),
    ],
)
def test_files_that_do_not_go_together_are_one_line_and_write_nothing(folder: Path, arguments: list[str], message: str):
    library, *files = arguments
    refused = convert(library, "--to", "parameters.yml", *files)
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1
    assert message in refused.stderr
    assert not (folder / "parameters.yml").exists()


def test_globals_that_are_no_text_are_read_back_as_they_were():
    given = {"stage": "ppo", "reward_model": "http://h/s", "reward_model_type": "api", "enable_thinking": False}
    conversion = from_llamafactory(given)
    read = yaml.safe_load(conversion.globals_text())
    assert {name: value for name, value in read.items() if value is not None} == conversion.globals
    assert conversion.globals["chat_template_kwargs"] == {"enable_thinking": False}
    assert conversion.globals["reward_components"][0]["function"] == "reward_server:score"
