"""The walk of docs/converting.md for those who come from LLaMA-Factory or ms-swift, on tiny models, by the command."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import save_file

from tests.tiny_models import CHAT_TEMPLATE, PAD, adapter_of, save, tiny_model, word_tokenizer

pytestmark = pytest.mark.slow

QUESTIONS = [{"instruction": f"{a} {b}", "input": "", "output": "c"} for a in "abcdefgh" for b in "klmnop"]
PAIRS = [{"instruction": f"{a} {b}", "input": "", "chosen": "c", "rejected": "d"} for a in "abcd" for b in "klmnop"]
INFO = {
    "questions": {"file_name": "questions.json"},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
    },
}
PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
PPO = yaml.safe_load(re.findall(r"```yaml\n(# ppo\.yaml\n.*?)```", PAGE, re.DOTALL)[0]) | {
    **{"model_name_or_path": "models/sft", "max_new_tokens": 6, "per_device_train_batch_size": 4, "bf16": False},
    **{"ppo_buffer_size": 2, "num_train_epochs": 1, "learning_rate": 1e-3},
}
"""The file on the page, with sizes for tiny models."""
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
    (folder / "data").mkdir()
    for name, rows in {"questions": QUESTIONS, "pairs": PAIRS, "dataset_info": INFO}.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
    return folder


def history(project: Path) -> list[dict[str, str]]:
    with (project / "data" / "07_model_output" / "training_history" / "training_history.csv").open() as file:
        return list(csv.DictReader(file))


def test_llama_factorys_stage_ppo_runs_on_its_own_models_and_data(
    kedro: Callable[..., Result], project: Path, checkout: Path
):
    (checkout / "ppo.yaml").write_text(yaml.safe_dump(PPO))
    result = kedro(project, "convert-config", "--from", "llamafactory", str(checkout / "ppo.yaml"))
    assert result.exit_code == 0, result.output
    assert "Fill in" not in result.stderr
    assert "Then: kedro run --pipelines align" in result.stderr
    assert kedro(project, "doctor").exit_code == 0
    result = kedro(project, "run", "--pipelines", "align")
    assert result.exit_code == 0, result.output
    rows = history(project)
    assert len(rows) == 2  # 48 prompts, of which 5 are held out; 16 an iteration, and the rest of 43 is dropped
    assert float(rows[-1]["episode"]) == 32
    assert float(rows[-1]["optimiser/steps"]) == 2 * 4 * 2  # ppo_epochs x ppo_buffer_size in each iteration
    assert list((project / "data" / "06_models" / "ppo_policy").rglob("model.safetensors"))


def test_llama_factorys_three_stages_run_as_one_chain(kedro: Callable[..., Result], project: Path, checkout: Path):
    stages = {
        "ppo": {**PPO, "finetuning_type": "full"},
        "sft": {**TRAINING, "stage": "sft", "dataset": "questions"},
        "rm": {**TRAINING, "stage": "rm", "dataset": "pairs"},
    }
    for name, settings in stages.items():
        (checkout / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    files = [str(checkout / f"{name}.yaml") for name in stages]
    result = kedro(project, "convert-config", "--from", "llamafactory", *files)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1] == "Then: kedro run"
    own = "reward_modelling.minimum_accuracy=0,data_preparation.held_out_share=0.2"
    result = kedro(project, "run", "--params", own)
    assert result.exit_code == 0, result.output
    assert float(history(project)[-1]["episode"]) == 32  # 43 // 16 iterations of 16, as when stage ppo stands alone


def test_ms_swifts_script_runs_on_its_own_models_and_data(kedro: Callable[..., Result], project: Path, checkout: Path):
    classifier = tiny_model("gpt2", seed=5, reward=True, num_labels=1, pad_token_id=PAD)
    save(checkout / "models" / "reward", classifier, word_tokenizer(chat_template=CHAT_TEMPLATE))
    rows = [json.dumps({"query": row["instruction"]}) for row in QUESTIONS]
    (checkout / "data" / "questions.jsonl").write_text("\n".join(rows))
    (script,) = re.findall(r"```bash\n(# ppo\.sh\n.*?)```", PAGE, re.DOTALL)
    (checkout / "ppo.sh").write_text(script)
    result = kedro(project, "convert-config", "--from", "ms-swift", str(checkout / "ppo.sh"))
    assert result.exit_code == 0, result.output
    assert "Fill in" not in result.stderr
    result = kedro(project, "run", "--pipelines", "align", "--params", "ppo.dtype=float32,ppo.response_length=6")
    assert result.exit_code == 0, result.output
    rows = history(project)
    assert len(rows) == 2  # 43 prompts train, 4 x 8 an iteration of one process
    assert float(rows[-1]["optimiser/steps"]) == 2 * 4  # num_ppo_epochs in each iteration
