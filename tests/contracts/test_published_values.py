"""The values of the recipes and of the demo are those of their sources, and of the results that the pages show."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_rlhf.compat import from_trl
from ppo_rlhf.config import PPOConfig
from tests.compat.trl_source import TRL_LAST, TRL_LEGACY

CONF = Path(__file__).parents[2] / "conf"


def group(environment: str, name: str) -> dict[str, Any]:
    """A group of parameters as the environment's own files have it; references to globals are left out."""
    texts = [path.read_text() for path in (CONF / environment).glob("parameters_*.yml")]
    [found] = [parameters[name] for parameters in map(yaml.safe_load, texts) if name in parameters]
    return {key: value for key, value in found.items() if not str(value).startswith("${")}


def settings(environment: str) -> dict[str, Any]:
    return asdict(PPOConfig(**group(environment, "ppo")))


def test_gsm8k_has_the_values_in_the_log_of_verls_run() -> None:
    """The configuration at the head of the log that docs/recipes.md links; a batch of 64 is one optimiser step."""
    verl = {
        "learning_rate": 1e-6,  # actor.optim.lr
        "value_learning_rate": 1e-5,  # critic.optim.lr
        "lr_scheduler_type": "constant",  # optim.warmup_style
        "warmup_ratio": 0.0,  # optim.lr_warmup_steps_ratio
        "weight_decay": 0.01,  # of torch's AdamW, which verl takes without an argument
        "max_grad_norm": 1.0,  # grad_clip
        "num_ppo_epochs": 1,  # ppo_epochs
        "num_mini_batches": 256 // 64,  # data.train_batch_size, ppo_mini_batch_size
        "total_episodes": 15 * (7473 // 256) * 256,  # trainer.total_epochs, the prompts that the log counts
        "response_length": 512,  # data.max_response_length
        "temperature": 1.0,  # rollout.temperature
        "cliprange": 0.2,  # actor.clip_ratio
        "cliprange_value": 0.5,  # critic.cliprange_value
        "entropy_coef": 0.001,  # actor.entropy_coeff
        "kl_coef": 0.001,  # algorithm.kl_ctrl.kl_coef
        "kl_controller": "fixed",  # algorithm.kl_ctrl.type
        "kl_estimator": "k1",  # algorithm.kl_penalty: kl
        "kl_in": "reward",
        "gamma": 1.0,  # algorithm.gamma
        "lam": 1.0,  # algorithm.lam
        "eval_interval": 10,  # trainer.test_freq
        "missing_eos_penalty": None,
    }
    found = settings("gsm8k")
    assert {name: found[name] for name in verl} == verl
    assert PPOConfig(**group("gsm8k", "ppo")).batch_size == 256  # data.train_batch_size


@pytest.mark.parametrize(
    ("recipe", "source", "others"),
    [
        # one pass over the training reviews, responses of at most 32 tokens
        ("imdb", TRL_LEGACY, {"total_episodes": 24832, "response_length": 32}),
        # the command of TRL's page, section "Benchmark experiments": 16 x 4 responses on each of 8 GPUs
        (
            "tldr",
            {
                **TRL_LAST,
                **{"learning_rate": 3e-6, "total_episodes": 1_000_000, "missing_eos_penalty": 1.0},
                **{"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4 * 8, "stop_token": "eos"},
            },
            {
                **{"overlong_prompts": "drop", "eval_interval": 100, "save_interval": 100},
                "local_rollout_forward_batch_size": None,  # what memory allows
            },
        ),
    ],
)
def test_a_recipe_of_trls_is_its_configuration_as_it_is_converted_but_for_what_is_named(
    recipe: str, source: dict[str, Any], others: dict[str, Any]
) -> None:
    ours, theirs = settings(recipe), asdict(from_trl(source).ppo_config())
    compared = ours.keys() - {"seed", "sft_model_path", "reward_model_path"}  # globals of the recipe
    assert {name: ours[name] for name in compared if ours[name] != theirs[name]} == others


def test_the_demo_has_the_values_that_its_results_were_measured_with() -> None:
    """README's and docs/results.md's numbers are of these values: whoever changes one measures them anew."""
    ppo = {
        **{"learning_rate": 4e-4, "value_learning_rate": 5e-4, "kl_coef": 0.08, "total_episodes": 80 * 64},
        **{"missing_eos_penalty": 1.0, "response_length": 36, "temperature": 1.0, "value_model": "reward_init"},
        "per_device_train_batch_size": 64,
    }
    reward_modelling = {
        **{"pairs": 8000, "label_beta": 8.0, "num_train_epochs": 3, "learning_rate": 4e-3},
        **{"per_device_train_batch_size": 32, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
    }
    supervised_finetuning = {
        **{"num_train_epochs": 3, "learning_rate": 6e-3, "per_device_train_batch_size": 32},
        **{"lr_scheduler_type": "cosine", "warmup_ratio": 0.05},
    }
    assert group("demo", "ppo") == ppo
    for name, values in (("reward_modelling", reward_modelling), ("supervised_finetuning", supervised_finetuning)):
        found = group("demo", name)
        assert {key: found[key] for key in values} == values
    assert group("demo", "supervised_finetuning")["from_scratch"]["num_hidden_layers"] == 3
    kl_study = {"kl_coefs": [0.02, 0.08, 0.32], "kl_target": 3.0, "kl_horizon": 300}
    assert group("base", "kl_study") | group("demo", "kl_study") == kl_study  # docs/studies.md
