"""`kedro plan-memory`: the project's settings or a person's options, what is said of them, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result

from ppo_rlhf.cli.plan_memory import _report
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.training.memory import Machine, RunShape
from ppo_rlhf.training.memory.plan import MemoryPlan, Phase
from tests.own_code import save_with_own_code
from tests.tiny_models import save, tiny_model

Kedro = Callable[..., Result]
SHORT = ("--response-length", "8")
PLENTY, NOTHING = Machine(2**40, 2**40), Machine(2**20, 2**20)


@pytest.fixture
def own(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a person's own small model and prompts."""
    monkeypatch.setattr("ppo_rlhf.training.memory.available_memory", lambda _: PLENTY)
    model = save(tmp_path / "own", tiny_model())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c d e"}\n{"prompt": "a b"}\n')
    settings = f"sft_model_path: {model}\nprompts_path: {tmp_path / 'prompts.jsonl'}\n"
    (project / "conf" / "local" / "globals.yml").write_text(settings)
    return project


def said(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    result = kedro(project, "plan-memory", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


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
    assert names[3:9] == [
        "Held all the time",
        "policy: weights",
        "reference policy: weights",
        "reward model: weights",
        "critic: weights",
        "optimisers: two moments of each weight that trains",
    ]
    assert names[11:17] == [
        "rollout",
        "scoring by the reference policy",
        "scoring by the policy",
        "scoring by the reward model",
        "scoring by the critic",
        "evaluation",
    ]
    assert names[17] == "update"
    assert re.fullmatch(
        r"Needed: 0\.\d\d GiB \(phase: .*, 0\.\d\d GiB of it the process itself\)\. Free: .*", lines[-2]
    )
    assert lines[-1] == "It fits."


def test_options_take_the_place_of_settings(kedro: Kedro, own: Path):
    options = ("--batch", "16", "--prompt-length", "20", "--dtype", "bfloat16", *SHORT)
    lines = said(kedro, own, *options)
    assert lines[0].endswith("bfloat16, on cpu")
    assert lines[1] == "Prompts of 20 and responses of 8 tokens; 16 at a time in the rollout, 16 in the update"


def test_a_configuration_is_enough_and_nothing_is_written(kedro: Kedro, own: Path, tmp_path: Path):
    file = tmp_path / "big.json"
    shape = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
    file.write_text(json.dumps({**shape, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}))
    before = sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts)
    lines = said(kedro, own, "--model", str(file), "--prompt-length", "64", "--batch", "8")
    assert lines[0] == f"{file}: LlamaConfig, float32, on cpu"
    (policy,) = [line for line in lines if line.startswith("  policy: weights")]
    assert policy.split()[-2:] == ["4.11", "GiB"]  # 1.10e9 parameters of 4 bytes
    assert sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.fixture
def with_code(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's own model with code of its own; transformers may not ask whether to run it."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks"))
    return save_with_own_code(tmp_path / "with_code", monkeypatch)


def test_a_models_own_code_runs_where_the_project_trusts_it(kedro: Kedro, own: Path, with_code: Path):
    trusted = f"sft_model_path={with_code},trust_remote_code=true"
    lines = said(kedro, own, *SHORT, "--params", trusted)
    assert lines[:2] == [
        f"{with_code}: OwnConfig, float32, on cpu",
        "Prompts of 5 and responses of 8 tokens; 64 at a time in the rollout, 64 in the update",
    ]
    given = said(kedro, own, *SHORT, "--model", str(with_code), "--params", "trust_remote_code=true")
    (with_code / "model.safetensors").unlink()
    configured = said(
        kedro,
        own,
        *SHORT,
        "--prompt-length",
        "5",
        "--params",
        "trust_remote_code=true",
        "--model",
        str(with_code / "config.json"),
    )
    assert given == lines
    assert configured[1:] == lines[1:]


@pytest.mark.parametrize("part", ["", "config.json"])
def test_a_models_own_code_does_not_run_unless_the_project_trusts_it(
    kedro: Kedro, own: Path, with_code: Path, part: str
):
    (with_code / "own.py").write_text("raise SystemExit('it ran')")
    error = refused(kedro, own, *SHORT, "--prompt-length", "5", "--model", str(with_code / part))
    assert "trust_remote_code" in error


def test_what_does_not_fit_is_told_what_to_change_first(kedro: Kedro, own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ppo_rlhf.training.memory.available_memory", lambda _: NOTHING)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # so that policy and critic go side by side
    lines = said(kedro, own, *SHORT)
    start = lines.index("It does not fit. Change first, each on top of those before it:")
    assert lines[start + 1].startswith("1. ppo.")
    assert lines[-1].startswith("That is all, and 0.")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert said(kedro, own, *SHORT)[start:] == [
        "It does not fit, and no setting changes that: take a smaller model, shorter texts or more memory."
    ]


def test_a_reward_of_functions_has_no_reward_model(kedro: Kedro, own: Path):
    (own / "conf" / "local" / "parameters.yml").write_text(
        'reward:\n  components:\n    - {type: function, function: "builtins:len"}\nppo: {value_model: separate}\n'
    )
    assert not any("reward model" in line for line in said(kedro, own, *SHORT))


@pytest.mark.parametrize("more", [(), ("padding", "graphs")])
def test_what_is_not_counted_is_said(more: tuple[str, ...]):
    plan = MemoryPlan({}, (Phase("update", 0, 1, 0),), on_host=0, on_cpu=False, critic_after_policy=True)
    lines = list(_report(replace(plan, not_counted=more), PPOConfig(), RunShape(tiny_model().config, 4)))
    assert [line for line in lines if line.startswith("Not counted")] == [f"Not counted: {each}" for each in more]


def test_without_a_model_there_is_nothing_to_plan(kedro: Kedro, project: Path):
    assert refused(kedro, project) == (
        "Error: There is no SFT model yet whose memory could be planned (sft_model_path, base_model_path): give one "
        "with --model, or set either in conf/local/globals.yml."
    )


def test_a_configuration_without_tokenizer_needs_the_length_of_the_prompts(kedro: Kedro, own: Path, tmp_path: Path):
    file = tmp_path / "own" / "config.json"
    assert refused(kedro, own, "--model", str(file)) == (
        f"Error: {file} has no tokenizer that could count the prompts' tokens: give --prompt-length."
    )


def test_a_file_that_is_no_configuration_is_refused(kedro: Kedro, own: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    assert refused(kedro, own, "--model", str(file)).startswith(
        f"Error: {file} cannot be read as a model's configuration: "
    )


def test_settings_that_do_not_go_together_are_refused(kedro: Kedro, own: Path):
    assert "ppo.kl_coeff" in refused(kedro, own, "--params", "ppo.kl_coeff=1")
    assert "has no meaning on the CPU" in refused(
        kedro, own, "--params", "ppo.offload_reward_model=true,ppo.device=cpu", *SHORT
    )


def test_outside_a_project_it_says_where_to_go(tmp_path: Path):
    import contextlib

    from click.testing import CliRunner

    from ppo_rlhf.cli import cli

    with contextlib.chdir(tmp_path):
        result = CliRunner().invoke(cli, ["plan-memory"])
    assert result.exit_code == 1
    assert "is not in a Kedro project" in result.output
