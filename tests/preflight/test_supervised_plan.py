"""The doctor's lines on SFT and reward modelling, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from transformers import LlamaConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.preflight import supervised_plan
from ppo_rlhf.preflight.memory import PROCESS_BYTES
from ppo_rlhf.preflight.supervised_plan import Training, describe, needed_bytes
from ppo_rlhf.supervised.optimisation import OptimisationConfig
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig
from tests.tiny_models import word_tokenizer

LLAMA = LlamaConfig(
    **{"vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
)
WEIGHTS = 2 * 25 * 16 + 2 * (16 * (16 + 8 + 8 + 16) + 3 * 16 * 24 + 2 * 16) + 16
WIDTHS = 2 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 2 * (16 + 24) + (24 + 16))
KEPT = int(1.5 * WIDTHS) * 4
"""Bytes that the linear layers' inputs and outputs take for a token."""


def a_training(sequences: int = 1, **settings: Any) -> Training:
    config = OptimisationConfig(per_device_train_batch_size=4, **settings)
    return Training("supervised_finetuning", "texts", config, 10, sequences, [5, 7])


def test_all_weights_their_gradients_and_moments_and_a_batch_of_the_longest_sequences_count():
    assert needed_bytes(a_training(), LLAMA) == 16 * WEIGHTS + 4 * 7 * KEPT
    assert needed_bytes(a_training(sequences=2), LLAMA) == 16 * WEIGHTS + 4 * 2 * 7 * KEPT
    assert needed_bytes(a_training(bf16=True), LLAMA) == 18 * WEIGHTS + 4 * 7 * KEPT // 2
    recomputed = 4 * 7 * (2 * 16 * 4 + KEPT // 2)
    assert needed_bytes(a_training(gradient_checkpointing=True), LLAMA) == 16 * WEIGHTS + recomputed


def test_a_tied_heads_gradient_waits_in_sft():
    tied = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
    weights = WEIGHTS - 25 * 16
    assert needed_bytes(a_training(), tied) == 16 * weights + 4 * 25 * 16 + 4 * 7 * KEPT
    assert needed_bytes(a_training(sequences=2), tied) == 16 * weights + 2 * 4 * 7 * KEPT


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 9), ({"gradient_accumulation_steps": 2}, 6), ({"num_train_epochs": 0.5}, 2), ({"max_steps": 4}, 4)],
)
def test_optimiser_steps_are_those_of_the_epochs_or_as_set(settings: dict[str, Any], steps: int):
    assert a_training(**settings).steps == steps


def a_run(**groups: Any) -> Any:
    data = {
        "sft_policy": SimpleNamespace(config=lambda: LLAMA, tokenizer=word_tokenizer),
        "demonstrations": pd.DataFrame({"text": ["good film", "a good film"]}),
        "checked_preferences": pd.DataFrame(),
        "prompt_dataset": SimpleNamespace(lengths=[3, 5]),
    }
    return SimpleNamespace(data=data, group=lambda name, _: groups.get(name), writes=lambda _: True, tokenizers={})


def test_each_training_of_a_run_gets_a_line_with_its_memory_and_time(monkeypatch: pytest.MonkeyPatch):
    """Pairs that the run samples are as long as the longest responses let them be."""
    monkeypatch.setattr(supervised_plan, "_time", lambda *_: "about 3 min")
    run = a_run(
        supervised_finetuning=SupervisedFinetuningConfig(device="cpu"),
        reward_modelling=RewardModellingConfig(device="cpu", pairs=100, held_out_share=0.2, num_train_epochs=1.0),
        ppo=PPOConfig(response_length=4),
    )
    (level, group, line), (_, second, pairs) = describe(run)
    assert (level, group, second) == ("ok", "supervised_finetuning", "reward_modelling")
    assert line.endswith(" texts of 4 tokens on average, 4 at most; about 3 min")
    assert pairs.endswith("on cpu, 10 steps of pairs of 8 tokens on average, 9 at most; about 3 min")


def test_a_training_that_does_not_fit_is_a_problem_that_names_what_to_lower(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervised_plan, "available_memory", lambda _: (PROCESS_BYTES, PROCESS_BYTES))
    ((level, _, line),) = describe(a_run(supervised_finetuning=SupervisedFinetuningConfig(device="cpu")))
    assert level == "problem"
    assert "lower supervised_finetuning.per_device_train_batch_size" in line
