"""The scripts on docs/converting.md, ported from TRL's, run as they stand there."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import PAD, save, tiny_model, word_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "converting.md").read_text()
TEXTS = [f"{a} {b} c d" for a in "abcdefgh" for b in "klmn"]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny policy, reward model, classifier and prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    save(tmp_path / "sft", tiny_model())
    save(tmp_path / "reward", tiny_model("gpt2", seed=5, reward=True, num_labels=1, pad_token_id=PAD))
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    save(tmp_path / "classifier", tiny_model("gpt2", seed=6, reward=True, num_labels=2, pad_token_id=PAD, **labels))
    (tmp_path / "prompts").mkdir()
    rows = [json.dumps({"prompt": text, "text": text}) for text in TEXTS]
    (tmp_path / "prompts" / "train.jsonl").write_text("\n".join(rows))
    return tmp_path


def run(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the script of this name as `python NAME --option value …` would; return its global names.

    Nobody has set up logging there; pytest and Kedro have here.
    """
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (script,) = re.findall(rf"```python\n(# {name}\n.*?)```", PAGE, re.DOTALL)
    Path(name).write_text(script)
    monkeypatch.setattr(sys, "argv", [name, *(word for key, value in options.items() for word in (key, str(value)))])
    return runpy.run_path(name, run_name="__main__")


def check_saved(policy: Any, folder: str) -> None:
    ids = torch.tensor([[4, 5, 6]])
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(saved(ids).logits, policy(ids).logits)
    assert not torch.equal(saved(ids).logits, tiny_model()(ids).logits)  # it has learnt


def test_the_script_of_trls_last_trainer_runs_with_trls_command_line(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = shlex.split(PAGE.partition("```text\npython ppo.py ")[2].partition("```")[0].replace("\\\n", " "))
    own = {
        "dataset_name": "prompts",
        "model_name_or_path": "sft",
        "sft_model_path": "sft",
        "reward_model_path": "reward",
    }
    own |= {"learning_rate": 1e-3, "per_device_train_batch_size": 8, "total_episodes": 24, "output_dir": "out"}
    options = dict(zip(words[::2], words[1::2], strict=True)) | {f"--{name}": value for name, value in own.items()}
    assert set(options) == set(words[::2])
    names = run("ppo.py", {**options, "--response_length": 6, "--device": "cpu"}, monkeypatch)
    trainer = names["trainer"]
    assert trainer._prompts.prompt_ids == word_tokenizer()(TEXTS)["input_ids"]
    assert trainer.config.missing_eos_penalty == 1.0
    assert len(trainer.history) == 3
    assert abs(trainer.history[0]["objective/kl"]) < 1e-5
    assert abs(trainer.history[-1]["objective/kl"]) > 1e-4
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()[:3]] == [
        f"Iteration {i}/3" for i in (1, 2, 3)
    ]
    assert (desk / "out" / "checkpoints" / "iteration_000003").is_dir()
    check_saved(trainer.policy, "out")
