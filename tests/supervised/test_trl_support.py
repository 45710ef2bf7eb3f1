"""The arguments of TRL's trainers: every setting of the two supervised trainings."""

import dataclasses

import pytest
from transformers import Trainer

from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.passes.gradient_checkpointing import NAME
from ppo_rlhf.supervised import trl_support
from ppo_rlhf.supervised.demonstrations import TokenisedDemonstrations
from ppo_rlhf.supervised.optimisation import OptimisationConfig
from tests.tiny_models import END, tiny_model, word_tokenizer

ROW = [4, 5, END]
TOLD = {  # a value that is not the default, and the arguments that TRL gets
    "num_train_epochs": (2.5, {"num_train_epochs": 2.5}),
    "max_steps": (7, {"max_steps": 7}),
    "learning_rate": (3e-4, {"learning_rate": 3e-4}),
    "lr_scheduler_type": ("cosine", {"lr_scheduler_type": "cosine"}),
    "warmup_ratio": (0.25, {"warmup_steps": 0.25}),  # a value below 1 is a share of the steps
    "weight_decay": (0.03, {"weight_decay": 0.03}),
    "max_grad_norm": (0.7, {"max_grad_norm": 0.7}),
    "per_device_train_batch_size": (3, {"per_device_train_batch_size": 3}),
    "gradient_accumulation_steps": (5, {"gradient_accumulation_steps": 5}),
    "max_length": (9, {"max_length": None}),  # sequences are truncated before
    "group_by_length": (False, {"train_sampling_strategy": "random"}),
    "gradient_checkpointing": (True, {NAME: True}),
    "bf16": (True, {"bf16": True}),
    "logging_steps": (4, {"logging_steps": 4}),
    "device": ("cpu", {"use_cpu": True}),
    "seed": (11, {"seed": 11}),
}
BY_DEFAULT = {"train_sampling_strategy": "group_by_length", NAME: False, "bf16": False}
"""What is told by our defaults where TRL's are others."""


@pytest.mark.parametrize("training", ["SFT", "reward"])
def test_every_setting_of_a_training_reaches_trl(training, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "train", lambda trainer: seen.append(trainer.args))
    assert TOLD.keys() == {field.name for field in dataclasses.fields(OptimisationConfig)}
    config = OptimisationConfig(**{name: value for name, (value, _) in TOLD.items()})
    assert all(getattr(config, field.name) != field.default for field in dataclasses.fields(config))
    told = {name: value for _, words in TOLD.values() for name, value in words.items()}
    for given, expected in ((config, told), (OptimisationConfig(device="cpu"), BY_DEFAULT)):
        model, tokenizer = tiny_model(), word_tokenizer()
        if training == "SFT":
            rows = TokenisedDemonstrations([ROW], [ROW])
            trl_support.run_sft_trainer(model, tokenizer, rows, given, lambda model: {})
        else:
            reward_model = CausalLMRewardModel.from_causal_lm(model)
            trl_support.run_reward_trainer(reward_model, tokenizer, [ROW], [ROW], given, lambda model: {})
        assert {name: getattr(seen[-1], name) for name in expected} == expected
