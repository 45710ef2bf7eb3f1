"""The memory plan of `kedro doctor`: of the project's settings or a user's options; bad ones are one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.preflight.memory import PROCESS_BYTES, MemoryPlan, RunShape, Suggestion
from ppo_rlhf.preflight.memory_plan import Planned
from tests.cli.test_doctor import own as own
from tests.own_code import save_with_own_code
from tests.tiny_models import save, tiny_model, word_tokenizer, write_gguf

Kedro = Callable[..., Result]
PLENTY, NOTHING = (2**40, 2**40), (2**20, 2**20)


@pytest.fixture(autouse=True)
def _plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_rlhf.preflight.memory_plan.available_memory", lambda _: PLENTY)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**40))  # others change it meanwhile


def said(kedro: Kedro, project: Path, *arguments: str, exit_code: int = 0) -> list[str]:
    """Return the lines of the plan, from the model's name on, without the time, which varies."""
    result = kedro(project, "doctor", *arguments)
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stdout.splitlines() if " Time " not in line]
    return lines[lines.index("") + 1 :]


def weights(lines: list[str], name: str) -> str:
    (size,) = [line[58:].strip() for line in lines if line.startswith(f"  {name}: weights")]
    return size


def billion_parameters(folder: Path) -> str:
    file = folder / "config.json"
    shape = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}
    file.write_text(json.dumps({**shape, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}))
    return str(file)


def problems(kedro: Kedro, project: Path, *arguments: str) -> list[str]:
    """Return the problems of a run that cannot be planned; the memory's or, if there are none, the settings'."""
    result = kedro(project, "doctor", *arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    assert "Held all the time" not in result.stdout
    found = [line for line in result.stdout.splitlines() if line.startswith("problem")]
    return [line for line in found if "Memory" in line] or found


def test_the_projects_model_prompts_and_settings_are_planned(kedro: Kedro, own: Path, tmp_path: Path):
    lines = said(kedro, own)
    assert lines[0] == f"{tmp_path / 'own'}: LlamaConfig, float32, on cpu"
    assert lines[1] == "Prompts of 5 and responses of 8 tokens; 8 at a time in the rollout, 8 in the update"
    names = [line[:58].strip() for line in lines]
    assert names[4:7] == ["policy: weights", "reference policy: weights", "critic: weights"]
    assert names[8] == "the process: Python and its libraries"
    assert names[11:15] == ["rollout", "scoring", "update", "evaluation"]
    [most] = [line[58:].split("<-")[0].strip() for line in lines if line.endswith("<- the most")]
    assert f"Memory    {most} needed of" in lines[-3]
    assert "of 1024.00 GiB free on cpu (phase: " in lines[-3]
    assert lines[-1] == "No problem found."


@pytest.mark.slow
def test_options_take_the_place_of_settings(kedro: Kedro, own: Path):
    options = (
        "--batch",
        "16",
        "--prompt-length",
        "20",
        "--dtype",
        "bfloat16",
        "--processes",
        "2",
        "--response-length",
        "9",
    )
    lines = said(kedro, own, *options)
    assert lines[0].endswith("bfloat16, on cpu")
    assert lines[1] == "Prompts of 20 and responses of 9 tokens; 16 at a time in the rollout, 16 in the update"
    assert "2 processes" in lines[2]
    assert any("of 512.00 GiB free" in line for line in lines)


@pytest.mark.slow
def test_a_configuration_is_enough_and_nothing_is_written(kedro: Kedro, own: Path, tmp_path: Path):
    file = billion_parameters(tmp_path)
    before = sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts)
    lines = said(kedro, own, "--model", file, "--prompt-length", "64", "--batch", "8")
    assert weights(lines, "policy") == "4.11 GiB"  # 1.10e9 parameters of 4 bytes
    assert sorted(path for path in own.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.slow
def test_an_adapter_is_planned_as_its_base(kedro: Kedro, own: Path, tmp_path: Path):
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "own"), LoraConfig(r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    lines = said(kedro, own, "--params", f"sft_model_path={tmp_path / 'adapter'}")
    assert lines[0] == f"{tmp_path / 'adapter'}: LlamaConfig, float32, on cpu"
    assert lines[1:] == said(kedro, own)[1:]


def test_a_gguf_file_is_planned_from_its_header_which_is_kept(kedro: Kedro, own: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf")
    lines = said(kedro, own, "--params", f"sft_model_path={tmp_path / 'tiny.gguf'}")
    assert lines[0] == f"{tmp_path / 'tiny.gguf'}: LlamaConfig, float32, on cpu"
    assert lines[-1] == "No problem found."
    (kept,) = (own / "data/02_intermediate/gguf").iterdir()
    assert (kept / "config.json").is_file()
    assert not list(kept.glob("*.safetensors"))
    assert said(kedro, own, "--model", str(tmp_path / "tiny.gguf"))[0] == lines[0]


@pytest.mark.slow
def test_a_models_own_code_runs_only_where_the_project_trusts_it(
    kedro: Kedro, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks"))
    model = save_with_own_code(tmp_path / "with_code", monkeypatch)
    trusted = ("--params", "trust_remote_code=true", "--prompt-length", "5")
    lines = said(kedro, own, *trusted, "--model", str(model))
    assert lines[0] == f"{model}: OwnConfig, float32, on cpu"
    (model / "model.safetensors").unlink()
    assert said(kedro, own, *trusted, "--model", str(model / "config.json"))[1:] == lines[1:]
    (model / "own.py").write_text("raise SystemExit('it ran')")
    for place in (model, model / "config.json"):
        [line] = problems(kedro, own, "--prompt-length", "5", "--model", str(place))
        assert "trust_remote_code" in line


@pytest.mark.slow
def test_what_to_change_first_is_said_if_it_does_not_fit(kedro: Kedro, own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ppo_rlhf.preflight.memory_plan.available_memory", lambda _: NOTHING)
    found = [Suggestion({"value_model": "shared", "value_learning_rate": None}, "another critic", 2**20)]
    monkeypatch.setattr("ppo_rlhf.preflight.memory.suggestions", lambda *_: iter(found))
    lines = said(kedro, own, exit_code=1)
    at = next(row for row, line in enumerate(lines) if line.endswith(" does not fit."))
    heading, line = lines[at + 1 : at + 3]
    assert re.search("lowers.* peak", heading)
    assert line == "1. ppo.value_model=shared, ppo.value_learning_rate=null (another critic): 0.59 GiB"
    found.clear()
    assert any(line.startswith("No setting ") for line in said(kedro, own, exit_code=1))


@pytest.fixture
def with_a_reward_model(own: Path) -> Path:
    """The same project with a reward model of another vocabulary, left by an earlier run, from which critics start."""
    (own / "conf" / "local" / "parameters.yml").write_text("ppo: {response_length: 8, value_model: reward_init}")
    reward = tiny_model("gpt2", reward=True, num_labels=1, vocab_size=12)
    save(own / "data/06_models/reward_model/2026-01-01", reward, word_tokenizer())
    return own


@pytest.mark.slow
def test_the_projects_reward_model_is_not_planned_for_another_policy(
    kedro: Kedro, with_a_reward_model: Path, tmp_path: Path
):
    """The critic starts as the reward model, which the other policy could not read."""
    other = ("--model", billion_parameters(tmp_path), "--prompt-length", "64", "--batch", "8")
    lines = said(kedro, with_a_reward_model, *other)
    sizes = [weights(lines, name) for name in ("reward model", "critic")]
    assert sizes == ["3.87 GiB"] * 2  # 4.11 less 0.24 of the head


@pytest.mark.slow
def test_a_reward_model_that_is_named_or_of_the_projects_own_policy_is_planned(
    kedro: Kedro, with_a_reward_model: Path, tmp_path: Path
):
    named = f"reward_model_path={with_a_reward_model / 'data/06_models/reward_model/2026-01-01'}"
    policy = save(with_a_reward_model / "data/06_models/sft_policy/2026-01-01", tiny_model())
    for given in (("--model", str(tmp_path / "own"), "--params", named), ("--model", policy)):
        [line] = problems(kedro, with_a_reward_model, *given)
        assert "ppo.value_model" in line


@pytest.mark.slow
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_plan_may_be_made_for_memory_that_is_not_here(kedro: Kedro, own: Path, device: str):
    is_here = device == "auto"
    lines = said(kedro, own, "--memory", "24", "--params", f"ppo.device={device}", exit_code=0 if is_here else 1)
    # ppo.dtype=auto is bfloat16 on a GPU that is not here
    assert lines[0].endswith(", float32, on cpu" if is_here else f", bfloat16, on {device}")
    assert any(line.startswith("ok       Memory") and "of 24.00 GiB free" in line for line in lines)
    settled = [line for line in lines if "tokens in a micro-batch (ppo.max_tokens_per_micro_batch: chosen from" in line]
    assert len(settled) == (not is_here)
    lines = said(kedro, own, "--memory", "0.0001", "--params", f"ppo.device={device}", exit_code=1)
    assert any(line.endswith(" does not fit.") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_is_needed_suffices_to_the_last_byte(on_cpu: bool, missing: int):
    """Four processes of 7 bytes: on the CPU with their libraries, in one memory; else those and the offloaded models
    are in the host's.
    """
    shape = RunShape(LlamaConfig(), 6, on_cpu=on_cpu, processes=4)
    plan = MemoryPlan(
        {},
        {"rollout": 5, "update": 7},
        on_host=3,
        trained=0,
        exported=0,
        rollout_rows=1,
        update_rows=1,
        update_tokens=None,
        shared_length=0,
    )
    free = 4 * (7 + PROCESS_BYTES) if on_cpu else 7
    device, on_host = torch.device("cpu"), 4 * (3 + PROCESS_BYTES) - missing
    planned = Planned("model", PPOConfig(), shape, plan, device, free - missing, on_host)
    assert (planned.needed <= planned.share) == (missing == 0)
    assert (planned.waiting <= planned.on_host) == (on_cpu or missing == 0)


@pytest.mark.slow
def test_bad_input_is_one_line(kedro: Kedro, own: Path, tmp_path: Path):
    for arguments, named in {
        ("--model", billion_parameters(tmp_path)): "--prompt-length",
        ("--model", str(tmp_path / "prompts.jsonl"), "--prompt-length", "5"): "prompts.jsonl",
        ("--memory", "24", "--params", "ppo.kl_coeff=1"): "ppo.kl_coeff",
        ("--model", str(tmp_path / "own"), "--params", "sead=1"): "`seed`",
    }.items():
        [line] = problems(kedro, own, *arguments)
        assert named in line


@pytest.mark.slow
def test_pipelines_without_ppo_have_no_plan(kedro: Kedro, project: Path):
    result = kedro(project, "doctor", "--env", "test", "--pipelines", "data_preparation")
    assert "these pipelines do not train by PPO" in result.stdout
