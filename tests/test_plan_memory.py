"""`kedro plan-memory`: it plans the project's settings or a person's options, and refuses bad ones in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import LlamaConfig

from ppo_rlhf.cli.plan_memory import Planned, _report
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.memory import PROCESS_BYTES, MemoryPlan, RunShape, Suggestion
from tests.own_code import save_with_own_code
from tests.tiny_models import save, tiny_model, word_tokenizer

Kedro = Callable[..., Result]
SHORT = ("--response-length", "8")
PLENTY, NOTHING = (2**40, 2**40), (2**20, 2**20)


@pytest.fixture
def own(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a person's own small model and prompts."""
    monkeypatch.setattr("ppo_rlhf.memory.available_memory", lambda _: PLENTY)
    model = save(tmp_path / "own", tiny_model())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c d e"}\n{"prompt": "a b"}\n')
    settings = f"sft_model_path: {model}\nprompts_path: {tmp_path / 'prompts.jsonl'}\n"
    (project / "conf" / "local" / "globals.yml").write_text(settings)
    return project


def said(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    result = kedro(project, "plan-memory", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def weights(lines: list[str], name: str) -> str:
    (size,) = [line[58:].strip() for line in lines if line.startswith(f"  {name}: weights")]
    return size


def billion_parameters(folder: Path) -> str:
    file = folder / "big.json"
    shape = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
    file.write_text(json.dumps({**shape, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}))
    return str(file)


def refused(kedro: Kedro, project: Path, *arguments: str) -> str:
    result = kedro(project, "plan-memory", *arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    [line] = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    return line


def test_the_projects_model_prompts_and_settings_are_planned(kedro: Kedro, own: Path, tmp_path: Path):
    lines = said(kedro, own, *SHORT, "--params", "ppo.value_model=separate")
    assert lines[0] == f"{tmp_path / 'own'}: LlamaConfig, float32, on cpu"
    assert lines[1] == "Prompts of 5 and responses of 8 tokens; 64 at a time in the rollout, 64 in the update"
    names = [line[:58].strip() for line in lines]
    assert names[4:8] == ["policy: weights", "reference policy: weights", "reward model: weights", "critic: weights"]
    assert names[11:15] == ["rollout", "scoring", "update", "evaluation"]
    assert lines[-2].startswith("Needed: 0.")
    assert lines[-1] == "It fits."


@pytest.mark.slow
def test_options_take_the_place_of_settings(kedro: Kedro, own: Path):
    options = ("--batch", "16", "--prompt-length", "20", "--dtype", "bfloat16", "--processes", "2", *SHORT)
    lines = said(kedro, own, *options)
    assert lines[0].endswith("bfloat16, on cpu")
    assert lines[1] == "Prompts of 20 and responses of 8 tokens; 16 at a time in the rollout, 16 in the update"
    assert lines[2] == "Of 2 processes each needs:"
    assert any("Free: 512.00 GiB" in line for line in lines)


def test_a_configuration_is_enough_and_nothing_is_written(kedro: Kedro, own: Path, tmp_path: Path):
    file = billion_parameters(tmp_path)
    before = sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts)
    lines = said(kedro, own, "--model", file, "--prompt-length", "64", "--batch", "8")
    assert weights(lines, "policy") == "4.11 GiB"  # 1.10e9 parameters of 4 bytes
    assert sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.slow
def test_a_models_own_code_runs_only_where_the_project_trusts_it(
    kedro: Kedro, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks"))
    model = save_with_own_code(tmp_path / "with_code", monkeypatch)
    trusted = ("--params", "trust_remote_code=true", *SHORT, "--prompt-length", "5")
    lines = said(kedro, own, *trusted, "--model", str(model))
    assert lines[0] == f"{model}: OwnConfig, float32, on cpu"
    (model / "model.safetensors").unlink()
    assert said(kedro, own, *trusted, "--model", str(model / "config.json"))[1:] == lines[1:]
    (model / "own.py").write_text("raise SystemExit('it ran')")
    for place in (model, model / "config.json"):
        assert "trust_remote_code" in refused(kedro, own, *SHORT, "--prompt-length", "5", "--model", str(place))


@pytest.mark.slow
def test_what_to_change_first_is_said_if_it_does_not_fit(kedro: Kedro, own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ppo_rlhf.memory.available_memory", lambda _: NOTHING)
    found = [Suggestion({"value_model": "shared", "value_learning_rate": None}, "another critic", 2**20)]
    monkeypatch.setattr("ppo_rlhf.memory.suggestions", lambda *_: iter(found))
    *_, heading, line = said(kedro, own, *SHORT)
    assert heading.startswith("It does not fit. Each of these")
    assert line == "1. ppo.value_model=shared, ppo.value_learning_rate=null (another critic): 0.59 GiB"
    found.clear()
    assert said(kedro, own, *SHORT)[-1].startswith("It does not fit, and no setting changes that")


@pytest.mark.slow
def test_a_reward_of_functions_has_no_reward_model(kedro: Kedro, own: Path):
    (own / "conf" / "local" / "parameters.yml").write_text(
        'reward:\n  components:\n    - {type: function, function: "builtins:len"}\nppo: {value_model: separate}\n'
    )
    assert not any("reward model" in line for line in said(kedro, own, *SHORT))


@pytest.fixture
def after_the_demo(own: Path) -> Path:
    """The same project, where a run of the demo left a reward model of other words."""
    reward = tiny_model("gpt2", reward=True, num_labels=1, vocab_size=12)
    save(own / "data/06_models/reward_model/2026-01-01", reward, word_tokenizer())
    return own


@pytest.mark.slow
def test_the_demos_reward_model_is_not_planned_for_another_policy(kedro: Kedro, after_the_demo: Path, tmp_path: Path):
    """The demo's critic starts as the reward model, which the other policy could not read."""
    said(kedro, after_the_demo, *SHORT)
    lines = said(
        kedro, after_the_demo, "--model", billion_parameters(tmp_path), "--prompt-length", "64", "--batch", "8"
    )
    assert [weights(lines, name) for name in ("reward model", "critic")] == [
        "3.87 GiB"
    ] * 2  # 4.11 less 0.24 of the head


@pytest.mark.slow
def test_a_reward_model_that_is_named_is_planned(kedro: Kedro, after_the_demo: Path, tmp_path: Path):
    named = f"reward_model_path={after_the_demo / 'data/06_models/reward_model/2026-01-01'}"
    for model in ((), ("--model", str(tmp_path / "own"))):
        assert "ppo.value_model" in refused(kedro, after_the_demo, *SHORT, *model, "--params", named)


@pytest.mark.slow
def test_the_projects_own_policy_is_planned_with_the_projects_own_reward_model(kedro: Kedro, after_the_demo: Path):
    policy = save(after_the_demo / "data/06_models/sft_policy/2026-01-01", tiny_model())
    assert "ppo.value_model" in refused(kedro, after_the_demo, *SHORT, "--model", policy)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_plan_may_be_made_for_memory_that_is_not_here(kedro: Kedro, own: Path, device: str):
    lines = said(kedro, own, *SHORT, "--memory", "24", "--params", f"ppo.device={device}")
    assert lines[0].endswith(f"on {device.replace('auto', 'cpu')}")
    assert lines[-2].endswith("Free: 24.00 GiB.")
    assert lines[-1] == "It fits."
    lines = said(kedro, own, *SHORT, "--memory", "0.0001", "--params", f"ppo.device={device}")
    assert any(line.startswith("It does not fit") for line in lines)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_is_needed_suffices_to_the_last_byte(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, missing: int):
    """Four processes of 7 bytes: on the CPU with their libraries, in one memory; else those and the offloaded models
    lie in the host's.
    """
    shape = RunShape(LlamaConfig(), 6, on_cpu=on_cpu, processes=4)
    plan = MemoryPlan({}, {"rollout": 5, "update": 7}, on_host=3, trained=0, exported=0)
    free = 4 * (7 + PROCESS_BYTES) if on_cpu else 7
    device, on_host = torch.device("cpu"), 4 * (3 + PROCESS_BYTES) - missing
    planned = Planned("model", PPOConfig(), shape, plan, device, free - missing, on_host)
    monkeypatch.setattr("ppo_rlhf.memory.suggestions", lambda *_: iter(()))
    lines = list(_report(planned))
    assert lines[-1].startswith("It does not fit" if missing else "It fits.")
    assert any(line.startswith("The host needs") for line in lines) == (missing == 1 and not on_cpu)


@pytest.mark.slow
def test_settings_that_are_typed_and_not_planned_with_are_refused(kedro: Kedro, own: Path):
    line = refused(kedro, own, *SHORT, "--params", "supervised_finetuning.learning_rate=1")
    assert line.startswith("Error: --params supervised_finetuning.learning_rate: nothing in this command reads it")


@pytest.mark.slow
def test_bad_input_is_one_line(kedro: Kedro, own: Path, tmp_path: Path):
    assert "--prompt-length" in refused(kedro, own, "--model", str(tmp_path / "own" / "config.json"))
    prompts = tmp_path / "prompts.jsonl"
    assert "cannot be read as a model's configuration" in refused(kedro, own, "--model", str(prompts))
    assert "ppo.kl_coeff" in refused(kedro, own, "--params", "ppo.kl_coeff=1")
    offloaded = "ppo.offload_reward_model=true,ppo.device=cpu"
    assert "ppo.offload_reward_model" in refused(kedro, own, "--params", offloaded, *SHORT)


@pytest.mark.slow
def test_without_a_model_there_is_nothing_to_plan(kedro: Kedro, project: Path):
    assert "--model" in refused(kedro, project)
