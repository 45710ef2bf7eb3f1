"""The walk of docs/converting.md for those who come from LLaMA-Factory or ms-swift, on tiny models, by the command."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import save_file

from tests.tiny_models import CHAT_TEMPLATE, PAD, adapter_of, save, tiny_model, word_tokenizer

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt": f"{a} {b}"} for a in "abcdefgh" for b in "klmnop"]
TEXTS = [row | {"completion": " c"} for row in PROMPTS]
PAIRS = [row | {"chosen": " c", "rejected": " d"} for row in PROMPTS]
PPO = {
    **{"stage": "ppo", "do_train": True, "model_name_or_path": "models/sft", "finetuning_type": "lora"},
    **{"lora_rank": 16, "lora_target": "all", "reward_model": "saves/reward", "dataset": "questions"},
    **{"template": "qwen", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "ppo_buffer_size": 2},
    **{"learning_rate": 1e-3, "num_train_epochs": 1, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
    **{"bf16": False, "max_new_tokens": 6},
}
"""A configuration for `llamafactory-cli train`, with sizes for tiny models."""
SWIFT = {
    **{"rlhf_type": "ppo", "model": "models/sft", "reward_model": "models/reward", "tuner_type": "full"},
    **{"dataset": ["data/questions.jsonl"], "torch_dtype": "bfloat16", "per_device_train_batch_size": 4},
    **{"learning_rate": 1e-6, "num_train_epochs": 1, "max_completion_length": 256, "ENV": {"NPROC_PER_NODE": 2}},
}
"""Arguments of ms-swift, for two processes."""
TRAINING = {
    **{"do_train": True, "finetuning_type": "full", "model_name_or_path": "models/sft", "template": "qwen"},
    **{"learning_rate": 1e-3, "num_train_epochs": 1.0, "per_device_train_batch_size": 4, "cutoff_len": 24},
    "logging_steps": 1,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder as LLaMA-Factory's users have it: a model, the reward model that stage rm wrote, data, settings."""
    folder = tmp_path / "checkout"
    base = tiny_model()
    path = save(folder / "models" / "sft", base, word_tokenizer(chat_template=CHAT_TEMPLATE))
    adapter_of(base, folder / "saves" / "reward", path, task_type="CAUSAL_LM")
    head = {"v_head.summary.weight": torch.linspace(-1.0, 1.0, 16)[None], "v_head.summary.bias": torch.zeros(1)}
    save_file(head, folder / "saves" / "reward" / "value_head.safetensors")
    for name, rows in {"prompts": PROMPTS, "texts": TEXTS, "pairs": PAIRS}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def history(project: Path) -> list[dict[str, str]]:
    with (project / "data" / "07_model_output" / "training_history" / "training_history.csv").open() as file:
        return list(csv.DictReader(file))


def fill_in(project: Path, checkout: Path, **tables: str) -> None:
    """Set the tables in globals.yml as a user does."""
    file = project / "conf" / "local" / "globals.yml"
    lines = file.read_text().splitlines()
    for name, table in tables.items():
        (number,) = (i for i, line in enumerate(lines) if line.startswith(f"{name}: null # FILL IN"))
        lines[number] = f"{name}: {checkout / table}"
    file.write_text("\n".join(lines))


def test_llama_factorys_stage_ppo_runs_on_its_own_models(kedro: Callable[..., Result], project: Path, checkout: Path):
    (checkout / "ppo.yaml").write_text(yaml.safe_dump(PPO))
    # of 48 prompts 5 are held out
    result = kedro(project, "convert-config", "--from", "llamafactory", "--prompts", "43", str(checkout / "ppo.yaml"))
    assert result.exit_code == 0, result.output
    assert "Fill in before you run: prompts_path in" in result.stderr
    assert "Then: kedro run --pipelines align" in result.stderr
    fill_in(project, checkout, prompts_path="prompts.jsonl")
    assert kedro(project, "doctor").exit_code == 0
    result = kedro(project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    rows = history(project)
    assert len(rows) == 2  # 16 an iteration, and the rest of 43 is dropped
    assert float(rows[-1]["episode"]) == 32
    assert float(rows[-1]["optimiser/steps"]) == 2 * 4 * 2  # ppo_epochs x ppo_buffer_size in each iteration
    assert list((project / "data" / "06_models" / "ppo_policy").rglob("model.safetensors"))


def test_llama_factorys_three_stages_run_as_one_chain(kedro: Callable[..., Result], project: Path, checkout: Path):
    stages = {
        "ppo": {**PPO, "finetuning_type": "full"},
        "sft": {**TRAINING, "stage": "sft"},
        "rm": {**TRAINING, "stage": "rm"},
    }
    for name, settings in stages.items():
        (checkout / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    files = [str(checkout / f"{name}.yaml") for name in stages]
    result = kedro(project, "convert-config", "--from", "llamafactory", "--prompts", "43", *files)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == "Then: kedro run"
    tables = {"demonstrations_path": "texts.jsonl", "preferences_path": "pairs.jsonl"}
    fill_in(project, checkout, prompts_path="prompts.jsonl", **tables)
    own = "reward_modelling.minimum_accuracy=0,data_preparation.held_out_share=0.2"
    result = kedro(project, "run", "--params", own)
    assert result.exit_code == 0, result.output
    assert float(history(project)[-1]["episode"]) == 32


def test_ms_swifts_arguments_run_on_its_own_models(kedro: Callable[..., Result], project: Path, checkout: Path):
    classifier = tiny_model("gpt2", seed=5, reward=True, num_labels=1, pad_token_id=PAD)
    save(checkout / "models" / "reward", classifier, word_tokenizer(chat_template=CHAT_TEMPLATE))
    (checkout / "swift.yaml").write_text(yaml.safe_dump(SWIFT))
    result = kedro(project, "convert-config", "--from", "ms-swift", "--prompts", "43", str(checkout / "swift.yaml"))
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == "Then: torchrun --nproc_per_node 2 -m kedro run --pipelines align"
    fill_in(project, checkout, prompts_path="prompts.jsonl")
    own = "ppo.dtype=float32,ppo.response_length=6,ppo.gradient_accumulation_steps=4"  # one process in place of two
    result = kedro(project, "run", "--pipelines", "align", "--params", own)
    assert result.exit_code == 0, result.output
    rows = history(project)
    assert len(rows) == 3  # 43 responses, 4 x 4 an iteration
    assert float(rows[-1]["optimiser/steps"]) == 3 * 4  # num_ppo_epochs in each iteration
