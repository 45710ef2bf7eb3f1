"""`kedro convert-config`: its sources, its files, its report, and the errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from kedro.config import OmegaConfigLoader

from ppo_rlhf.cli import cli
from ppo_rlhf.compat import Conversion, from_llamafactory, from_trl
from ppo_rlhf.compat.conversion import texts_of
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.compat.trl_source import LEGACY_SCRIPT, TRL_LEGACY

ROOT = Path(__file__).parents[2]
CONVERSIONS = {
    "legacy, all fields": from_trl(TRL_LEGACY),
    "last, no field": from_trl({}),
    "last, values that are refused": from_trl(
        {"kl_coef": -1, "learning_rate": 0, "response_length": 0, "temperature": 0, "missing_eos_penalty": -1}
        | {"total_episodes": 64, "stop_token_id": 5}
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder that is not in a project, with a legacy configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "legacy.yaml").write_text(yaml.safe_dump(LEGACY_SCRIPT))
    return tmp_path


def convert(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["convert-config", "--from", *arguments])


def written(folder: Path) -> dict[str, Any]:
    texts = [path.read_text() for path in (folder / "parameters.yml", folder / "globals.yml") if path.exists()]
    return {name: value for text in texts for name, value in yaml.safe_load(text).items()}


def base_ppo() -> dict[str, Any]:
    """The group of conf/base without the seed, which is a global."""
    group: dict[str, Any] = yaml.safe_load((ROOT / "conf/base/parameters_ppo.yml").read_text())["ppo"]
    return {name: value for name, value in group.items() if name != "seed"}


def parameters(conversion: Conversion) -> dict[str, Any]:
    """The contents of parameters.yml and globals.yml: a model gives the reward, also in a project with a function."""
    return conversion.parameters | dict.fromkeys(conversion.missing) | {"reward_components": [{"type": "model"}]}


@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS)
def test_kedro_reads_the_files_as_the_conversion_over_what_the_source_does_not_have(
    conversion: Conversion, tmp_path: Path
):
    """The result keeps from conf/base's group ppo only settings that the source library does not have."""
    (tmp_path / "base").symlink_to(ROOT / "conf" / "base")
    (tmp_path / "local").mkdir()
    for name, text in zip(("parameters", "globals"), texts_of([conversion]), strict=True):
        (tmp_path / "local" / f"{name}.yml").write_text(text)
    loader = OmegaConfigLoader(str(tmp_path), env="local", **CONFIG_LOADER_ARGS)
    left = {name: value for name, value in base_ppo().items() if name not in conversion.parameters["ppo"]}
    assert left.keys() <= {"total_episodes", "response_length", "missing_eos_penalty"}
    expected = conversion.ppo_config(**left)
    paths = {name: getattr(expected, name) for name in ("sft_model_path", "reward_model_path")}
    assert PPOConfig(**loader["parameters"]["ppo"], **paths) == expected


def test_every_value_says_where_it_comes_from_and_yaml_cannot_misread_it():
    conversion = from_trl({"steps": 10, "model_name": "yes", "query_dataset": "a: b #c.csv"})
    parameters_text, globals_text = texts_of([conversion])
    lines = (parameters_text + globals_text).splitlines()
    assert all(" # " in line for line in lines if not line.startswith("#") and line != "ppo:")
    assert yaml.safe_load(globals_text) == conversion.globals | {"reward_model_path": None}
    assert yaml.safe_load(parameters_text) == {"ppo": conversion.parameters["ppo"]}


def test_what_the_source_does_not_name_is_written_to_be_filled_in(folder: Path):
    result = convert("trl", "--to", "parameters.yml", "legacy.yaml")
    assert written(folder)["prompts_path"] is None
    assert "reward_model_path: null # FILL IN" in (folder / "globals.yml").read_text()
    assert "FILL IN: your prompts: a file, a folder, or a name on the hub" in (folder / "globals.yml").read_text()
    assert result.stderr.splitlines()[-2:] == [
        "Fill in before you run: reward_model_path, prompts_path in globals.yml.",
        "Then: kedro run --pipelines align",
    ]
    (folder / "whole.yaml").write_text("{sft_model_path: own/sft, reward_model_path: own/rm, dataset_name: own.jsonl}")
    result = convert("trl", "--to", "parameters.yml", "--force", "whole.yaml")
    assert written(folder)["prompts_path"] == "own.jsonl"
    assert "Fill in" not in result.stderr


@pytest.mark.slow
def test_a_file_of_trl_becomes_the_two_files_of_conf_local(kedro: Callable[..., Result], project: Path, folder: Path):
    result = kedro(project, "convert-config", "--from", "trl", str(folder / "legacy.yaml"))
    assert result.exit_code == 0, result.output
    assert written(project / "conf" / "local") == parameters(from_trl(LEGACY_SCRIPT))
    assert "Carried over: 10 settings. Not carried over: 3." in result.stderr.splitlines()
    assert "  target_kl: it has no effect with the other settings." in result.stderr
    assert result.stdout == ""
    refused = kedro(project, "run", "--pipelines", "align")
    assert refused.exit_code == 1
    for name in ("reward_model_path", "prompts_path"):
        assert name in refused.stderr


def test_json_is_read_too(folder: Path):
    (folder / "config.json").write_text(json.dumps({"kl_coef": 0.1, "num_train_epochs": 2}, indent="\t"))
    assert convert("trl", "--prompts", "32", "--to", "parameters.yml", "config.json").exit_code == 0
    assert written(folder) == parameters(from_trl({"kl_coef": 0.1, "total_episodes": 64}))


def test_a_dash_prints_the_parameters_and_writes_nothing(folder: Path):
    result = convert("trl", "--to", "-", "legacy.yaml")
    assert yaml.safe_load(result.stdout) == parameters(from_trl(LEGACY_SCRIPT))
    assert "Not carried over: 3" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["legacy.yaml"]


def test_existing_files_are_replaced_only_by_force(folder: Path):
    (folder / "globals.yml").write_text("seed: 7\n")
    refused = convert("trl", "--to", "parameters.yml", "legacy.yaml")
    assert refused.exit_code == 1
    assert "Already there: globals.yml. Give --force" in refused.stderr
    assert written(folder) == {"seed": 7}
    assert convert("trl", "--to", "parameters.yml", "--force", "legacy.yaml").exit_code == 0
    assert written(folder) == parameters(from_trl(LEGACY_SCRIPT))


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        ("kl_coef: [", ["trl", "config.yaml"], "config"),
        ("- kl_coef", ["trl", "config.yaml"], "mapping"),
        ("{ppo_epochs: 4, kl_coef: 0.1}", ["trl", "config.yaml"], "kl_coef"),
        ("{per_device_train_batch_size: 4, num_mini_batches: 3}", ["trl", "config.yaml"], "ppo.num_mini_batches=3"),
        ("kl_coef: 0.1", ["trl", "--to", "conf/globals.yml", "config.yaml"], "conf/globals.yml"),
        ("kl_coef: 0.1", ["trl", "--to", ".", "config.yaml"], "--to . is a folder: name the file, parameters.yml."),
        ("", ["trl", "absent.yaml"], "absent.yaml"),
    ],
)
def test_a_source_that_cannot_be_converted_is_one_line_and_writes_nothing(
    folder: Path, text: str, arguments: list[str], named: str
):
    (folder / "config.yaml").write_text(text)
    library, *rest = arguments
    result = convert(library, "--to", "parameters.yml", *rest)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert named in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "legacy.yaml"]


def test_outside_a_project_it_needs_to_be_told_where_to_write(folder: Path):
    refused = convert("trl", "legacy.yaml")
    assert refused.exit_code == 1
    assert "is not in a Kedro project" in refused.stderr


@pytest.mark.parametrize(
    ("files", "command", "sources"),
    [
        (["ppo"], "kedro run --pipelines align", 1),
        (["rm", "ppo"], "kedro run --pipelines reward_modelling,align", 2),
        (["sft"], "kedro run --pipelines data_preparation,supervised_finetuning", 1),
        (["sft", "rm", "ppo"], "kedro run", 3),
    ],
)
def test_the_last_line_runs_the_stages_that_were_converted(folder: Path, files: list[str], command: str, sources: int):
    for name in files:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"stage": name, "model_name_or_path": "org/base"}))
    result = convert("llamafactory", "--to", "parameters.yml", *(f"{name}.yaml" for name in files))
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == f"Then: {command}"
    assert result.stderr.count("Carried over:") == sources
    assert result.stderr.count("From LLaMA-Factory's stage") == (sources if sources > 1 else 0)
    globals_ = yaml.safe_load((folder / "globals.yml").read_text())
    assert ("sft_model_path" in globals_) == (files in (["ppo"], ["rm", "ppo"]))
    assert ("reward_model_path" in globals_) == (files == ["ppo"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llamafactory", "ppo.yaml", "ppo.yaml"], "stage=ppo"),
        (["trl", "ppo.yaml", "legacy.yaml"], "trl has all settings in one file, but 2 files are given"),
        (["ms-swift", "ppo.yaml"], "rlhf_type='dpo' has no counterpart"),
        (["verl", "ppo.sh"], "--cfg job --resolve"),
    ],
)
def test_files_that_are_not_converted_are_one_line_and_write_nothing(folder: Path, arguments: list[str], message: str):
    (folder / "ppo.yaml").write_text("stage: ppo")
    (folder / "ppo.sh").write_text("python -m verl.trainer.main_ppo\n")
    library, *files = arguments
    refused = convert(library, "--to", "parameters.yml", *files)
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1
    assert message in refused.stderr
    assert not (folder / "parameters.yml").exists()


def test_unknown_settings_are_printed(folder: Path):
    (folder / "ppo.yaml").write_text("{kl_coef: 0.1, own_setting: 3, num_ppo_epoch: 2}")
    lines = convert("trl", "--to", "-", "ppo.yaml").stderr.splitlines()
    assert "Carried over: 1 settings. Not carried over: 2." in lines
    assert "  own_setting: TRL's PPOConfig has no such setting, or it has no counterpart here." in lines
    assert any(line.startswith("  num_ppo_epoch: ") and line.endswith("is num_ppo_epochs.") for line in lines)


def test_globals_that_are_no_text_are_read_back_as_they_were():
    given = {"stage": "ppo", "reward_model": "http://h/s", "reward_model_type": "api", "enable_thinking": False}
    conversion = from_llamafactory(given)
    read = yaml.safe_load(texts_of([conversion])[1])
    assert {name: value for name, value in read.items() if value is not None} == conversion.globals
    assert conversion.globals["chat_template_kwargs"] == {"enable_thinking": False}
    assert conversion.globals["reward_components"][0]["function"] == "reward_server:score"


@pytest.mark.parametrize("library", ["trl", "ms-swift", "verl"])
def test_what_is_printed_has_no_control_characters_and_no_password(folder: Path, library: str):
    evil, address = "\x1b[2J\x1b]0;title\x07\x9b2J", "http://me:secret@host/x"
    names = {"trl": "reward_model_path", "ms-swift": "reward_model", "verl": "reward_model.model.path"}
    source = {"rlhf_type": "ppo"} if library == "ms-swift" else {}
    source |= {f"not{evil}known": 1, names[library]: evil, f"{address}{evil}": evil, "seed": evil}
    (folder / "source.json").write_text(json.dumps(source))
    arguments = ["convert-config", "--from", library, "source.json", "--to", "-"]
    result = CliRunner().invoke(cli, arguments, color=True)
    assert result.exit_code == 0, result.output
    assert r"not\x1b[2J\x1b]0;title\x07\x9b2Jknown" in result.stderr
    assert {char for char in result.stdout + result.stderr if not char.isprintable()} == {"\n"}
    assert "secret" not in result.stderr
