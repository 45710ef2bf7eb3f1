"""PPOConfig: TRL's formulas, its defaults except for a few, and errors in plain words."""

import copy
import dataclasses

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from tests.compat.trl_source import TRL_LAST, TRL_LEGACY, TRL_MODEL

DEPARTURES = {
    "dtype",
    "gradient_checkpointing",
    "local_rollout_forward_batch_size",
    "lora_target_modules",
    "reward_model_path",
    "save_interval",
    "save_total_limit",
    "sft_model_path",
    "stop_token",
    "total_episodes",
}
"""Settings whose default is not TRL's; docs/algorithm.md, section 10, has the reasons.

All defaults stand in docs/configuration.md, which a test compares with the code.
"""


def test_defaults_are_trls_except_for_the_departures():
    other_names = {  # ours and TRL's
        "dtype": "bf16",  # TRL's `dtype` is that of the weights
        "save_interval": "save_steps",
        "warmup_ratio": "warmup_steps",
        "compile": "torch_compile",
        "deterministic": "full_determinism",
    }
    trl = {**TRL_MODEL, **TRL_LAST}
    trl |= {name: trl[theirs] for name, theirs in other_names.items()}
    ours = dataclasses.asdict(PPOConfig())
    shared = trl.keys() & ours.keys()
    assert len(shared) == 43
    assert {name for name in shared if trl[name] != ours[name]} == DEPARTURES


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
        ("use_cpu", "ppo.device=cpu"),
        ("num_sample_generations", "each fifth"),
    ],
)
def test_a_name_of_other_libraries_is_refused_with_where_the_setting_lives(name, where):
    with pytest.raises(ConfigError, match=where):
        PPOConfig(**{name: 1})


def test_batch_sizes_count_all_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = PPOConfig(gradient_accumulation_steps=2, num_mini_batches=2, total_episodes=100)
    assert (config.world_size, config.micro_batch_size, config.local_batch_size, config.batch_size) == (4, 32, 16, 64)
    assert (config.mini_batch_size, config.local_mini_batch_size) == (32, 8)
    assert (config.local_micro_batch_size, config.num_total_batches) == (8, 2)


def test_the_settings_of_a_run_keep_its_number_of_processes():
    """A run on 8 processes has legal settings that this launch, of one process, would refuse."""
    given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "responses_per_prompt": 8}
    with pytest.raises(ConfigError, match=r"ppo\.responses_per_prompt=8 does not divide the batch of 1 "):
        PPOConfig(**given, num_mini_batches=1)
    config = PPOConfig.of_run(8, {**given, "num_mini_batches": 1})
    assert type(config) is PPOConfig
    for each in (config, dataclasses.replace(config, kl_coef=0.2), copy.copy(config)):
        assert (each.world_size, each.batch_size, each.prompts_per_batch) == (8, 8, 1)
    assert dataclasses.asdict(config).keys() == {field.name for field in dataclasses.fields(PPOConfig)}
    with pytest.raises(ConfigError, match=r"^ppo\.world_size is not a parameter of this group"):
        PPOConfig(world_size=8)
    with pytest.raises(ConfigError, match=r"^ppo\._processes=8: "):
        PPOConfig(_processes=8)
    with pytest.raises(ConfigError, match=r"Did you mean `kl_coef`"):
        PPOConfig.of_run(8, {"kl_coeff": 0.1})


def test_a_size_that_is_computed_can_be_read_and_not_given():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().mini_batch_size = 4
    with pytest.raises(ConfigError, match=r"ppo\.mini_batch_size .*ppo\.num_mini_batches"):
        PPOConfig(mini_batch_size=4)


def test_a_name_of_transformers_or_trl_suggests_no_setting_of_another_meaning():
    theirs = {*TRL_LAST, *TRL_MODEL, *TRL_LEGACY} - {field.name for field in dataclasses.fields(PPOConfig)}
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**dict.fromkeys(theirs))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(theirs) > 100
    assert [line for line in lines if "Did you mean" in line] == []
