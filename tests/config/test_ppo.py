"""PPOConfig: TRL's formulas, its defaults but for a few, and errors in plain words."""

import dataclasses

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from tests.compat.trl_source import TRL_LAST, TRL_MODEL

# A contract, written out by hand: TRL's where TRL has the setting, but for the departures in docs/algorithm.md.
DEFAULTS = {
    "num_ppo_epochs": 4,
    "cliprange": 0.2,
    "cliprange_high": None,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "gamma": 1.0,
    "lam": 0.95,
    "lam_critic": None,
    "whiten_rewards": False,
    "whiten_advantages": True,
    "entropy_coef": 0.0,
    "dual_clip": None,
    "target_kl": None,
    "loss_aggregation": "token_mean",
    "importance_cap": None,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "kl_in": "reward",
    "kl_controller": "fixed",
    "kl_target": 6.0,
    "kl_horizon": 10000,
    "kl_hold_iterations": 0,
    "kl_warning": 15,
    "kl_alarm": 20,
    "kl_stop": None,
    "reward_scale": 1.0,
    "reward_clip": None,
    "reward_normalisation": "none",
    "missing_eos_penalty": None,
    "truncated_responses": "keep",
    "overlong_buffer": None,
    "learning_rate": 3e-6,
    "value_learning_rate": None,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0,
    "critic_warmup_iterations": 0,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "ema_decay": None,
    "total_episodes": 10000,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64,
    "responses_per_prompt": 1,
    "max_tokens_per_micro_batch": None,
    "response_length": 53,
    "min_response_length": 0,
    "temperature": 0.7,
    "top_k": 0,
    "top_p": 1.0,
    "stop_token": "eos",
    "stop_token_id": None,
    "environment": None,
    "turn_length": None,
    "overlong_prompts": "error",
    "value_model": "separate",
    "use_peft": False,
    "load_in_4bit": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": "all-linear",
    "gradient_checkpointing": False,
    "compile": False,
    "export_value_head": False,
    "dtype": "float32",
    "offload_reference_policy": False,
    "offload_reward_model": False,
    "rollout_engine": "static",
    "device": "auto",
    "deterministic": False,
    "seed": 42,
    "sft_model_path": None,
    "reward_model_path": None,
    "eval_interval": 10,
    "save_interval": 10,
    "save_total_limit": 2,
    "sample_interval": 5,
    "shutdown_grace_s": 25.0,
    "max_skipped_steps": 5,
}


def test_every_field_has_its_contracted_default():
    config = PPOConfig()
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == DEFAULTS


DEPARTURES = {
    "dtype",
    "gradient_checkpointing",
    "lora_target_modules",
    "reward_model_path",
    "save_interval",
    "save_total_limit",
    "sft_model_path",
    "stop_token",
    "total_episodes",
}
"""Settings whose default is not TRL's; docs/algorithm.md, section 10, has the reasons."""


def test_defaults_are_trls_but_for_the_departures():
    other_names = {  # ours and TRL's
        "dtype": "bf16",  # TRL's `dtype` is that of the weights
        "save_interval": "save_steps",
        "warmup_ratio": "warmup_steps",
        "compile": "torch_compile",
        "deterministic": "full_determinism",
    }
    trl = {**TRL_MODEL, **TRL_LAST}
    trl |= {ours: trl[theirs] for ours, theirs in other_names.items()}
    shared = trl.keys() & DEFAULTS.keys()
    assert len(shared) == 42
    assert {name for name in shared if trl[name] != DEFAULTS[name]} == DEPARTURES


@pytest.mark.parametrize(
    ("sizes", "micro", "batch", "mini", "local_micro", "iterations"),
    [
        # (per device, accumulation, minibatches, episodes), then TRL's formulas worked by hand
        ((8, 1, 1, 10_000), 8, 8, 8, 8, 1250),
        ((8, 4, 1, 100), 8, 32, 32, 8, 4),  # 100 / 32 = 3.125: rounded up to full batches
        ((8, 4, 4, 96), 8, 32, 8, 8, 3),
        ((8, 2, 4, 1), 8, 16, 4, 4, 1),  # minibatches smaller than per_device: the micro-batch shrinks to them
        ((5, 3, 3, 46), 5, 15, 5, 5, 4),
        ((6, 2, 3, 12), 6, 12, 4, 4, 1),
    ],
)
def test_batch_sizes_follow_trl(sizes, micro, batch, mini, local_micro, iterations):
    per_device, accumulation, minibatches, episodes = sizes
    config = PPOConfig(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=minibatches,
        total_episodes=episodes,
    )
    assert config.world_size == 1
    assert config.micro_batch_size == micro
    assert config.local_batch_size == config.batch_size == batch
    assert config.local_mini_batch_size == config.mini_batch_size == mini
    assert config.local_micro_batch_size == local_micro
    assert config.num_total_batches == iterations


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("init_kl_coef", "ppo.kl_coef"),
        ("align_overflow", "skips"),
        ("lora_dropout", "dropout is always off"),
        ("model_name", "sft_model_path"),
    ],
)
def test_a_name_of_other_libraries_is_refused_with_where_the_setting_lives(name, where):
    with pytest.raises(ConfigError, match=where):
        PPOConfig(**{name: 1})


def test_batch_sizes_count_all_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = PPOConfig(gradient_accumulation_steps=2, num_mini_batches=2, total_episodes=100)
    assert (config.world_size, config.micro_batch_size, config.local_batch_size, config.batch_size) == (4, 32, 16, 64)
    assert (config.mini_batch_size, config.local_mini_batch_size, config.num_total_batches) == (32, 8, 2)
