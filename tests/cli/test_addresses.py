"""No setting that takes an address shows its password or token, in no line, file or run of MLflow."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from tests.conftest import REPOSITORY
from tests.tiny_models import save, tiny_model

ADDRESS = "http://me:sEcrEt1@127.0.0.1:9/x?token=sEcrEt2"
SHOWN = "http://***@127.0.0.1:9/x?token=***"
MINE = "sft_model_path=mine,reward_model_path=judge,prompts_path=prompts.jsonl"
SMALL = "ppo.response_length=4,ppo.per_device_train_batch_size=4,ppo.total_episodes=4"

RUNS = {
    "demonstrations_path": "--pipelines data_preparation",
    "preferences_path": "--pipelines reward_modelling --params sft_model_path=mine",
    "base_model_path": "--pipelines supervised_finetuning --params demonstrations_path=prompts.jsonl",
    "prompts_path": f"--pipelines align --params {SMALL},sft_model_path=mine",
    "evaluation_prompts_path": f"--pipelines align --params {SMALL},{MINE}",
    "reference_texts_path": f"--pipelines align --params {SMALL},{MINE}",
    "sft_model_path": f"--pipelines align --params {SMALL},prompts_path=prompts.jsonl",
    "reward_model_path": f"--pipelines align --params {SMALL},sft_model_path=mine,prompts_path=prompts.jsonl",
    "critic_path": f"--pipelines align --params {SMALL},{MINE},ppo.value_model=pretrained",
    "policy_path": f"--pipelines evaluation --params {MINE}",
    "resume": f"--pipelines align --params {SMALL},{MINE}",
    "ppo.vllm_server_base_url": f"--pipelines align --params {SMALL},{MINE}",
    "evaluation.judge": f"--pipelines align --params {SMALL},{MINE}",
    "feedback.answers": "--pipelines human_evaluation",
}
"""Arguments of `kedro run` that read each setting."""
BY_DEFAULT = ("ppo.vllm_server_base_url", "evaluation.judge")


@pytest.fixture
def own(project: Path) -> Path:
    """A project with small models and prompts."""
    save(project / "mine", tiny_model())
    save(project / "judge", tiny_model("gpt2", reward=True, num_labels=1))
    (project / "prompts.jsonl").write_text("".join(f'{{"prompt": "{word}", "text": "{word} a"}}\n' for word in "abcde"))
    return project


def check_hidden(result: Result, project: Path, log: str, shown: str = SHOWN) -> None:
    assert result.exit_code == 1, result.output
    assert shown in result.stderr
    assert "sEcrEt" not in result.output + log
    kept = {path.name for path in project.rglob("*") if path.is_file() and b"sEcrEt" in path.read_bytes()}
    assert kept <= {"mlflow.yml"}


@pytest.mark.parametrize(
    "setting", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_run_shows_no_secret_of_an_address(kedro: Callable[..., Result], own: Path, setting: str, caplog):
    *options, given = RUNS[setting].split(" ")
    given = f"{given}," if "--params" in options else f"{given} --params "
    result = kedro(own, "run", *options, *f"{given}{setting}={ADDRESS}".split(" "))
    check_hidden(result, own, caplog.text)


def test_every_path_and_address_of_the_settings_is_tried():
    text = "".join(path.read_text() for path in (REPOSITORY / "conf" / "base").glob("*.yml"))
    fields = (REPOSITORY / "docs" / "configuration.md").read_text()
    paths = {name for name in yaml.safe_load((REPOSITORY / "conf/base/globals.yml").read_text()) if "_path" in name}
    addresses = {*re.findall(r"\w*_url\b", text + fields)} - {"base_url"}  # llm.base_url takes none with a secret
    assert paths | {f"ppo.{name}" for name in addresses} <= RUNS.keys()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["run", "--pipelines", "align", "--params", f"{SMALL},{MINE}"], marks=pytest.mark.slow),
        ["advise"],
    ],
)
def test_the_tracking_store_is_named_without_its_secrets(kedro: Callable[..., Result], own: Path, command, caplog):
    (own / "conf" / "local" / "mlflow.yml").write_text(f"server: {{mlflow_tracking_uri: '{ADDRESS}'}}\n")
    check_hidden(kedro(own, *command), own, caplog.text)


def test_a_line_of_another_library_has_no_secrets():
    import ppo_rlhf.settings  # noqa: F401  # as Kedro does

    record = logging.getLogRecordFactory()("urllib3", logging.WARNING, "", 0, "Retrying after %s", (ADDRESS,), None)
    assert record.getMessage() == f"Retrying after {SHOWN}"
