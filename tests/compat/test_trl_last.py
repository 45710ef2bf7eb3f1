"""TRL's last PPOConfig: every setting is accounted for, and a converted run does what TRL's would do."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import pytest

from ppo_rlhf.compat import from_trl
from ppo_rlhf.core.errors import ConfigError
from tests.compat.bookkeeping import check_claims
from tests.compat.trl_source import TRL_LAST, TRL_LEGACY, TRL_MODEL


def ppo(**settings: Any) -> dict[str, Any]:
    return from_trl({"kl_coef": 0.05, **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_trl({"kl_coef": 0.05, **settings}).not_carried)


def test_of_every_field_of_the_configuration_and_of_the_scripts_more_than_25_are_carried():
    settings = {**TRL_LAST, **TRL_MODEL}
    assert len(settings) - len(from_trl(settings).not_carried) > 25


@pytest.mark.slow
def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one():
    others = {"kl_estimator": "k3", "gamma": 0.9, "lam": 0.9, "adam_beta1": 0.8, "adam_beta2": 0.95}
    others |= {"lr_scheduler_type": "cosine", "optim": "adamw_bnb_8bit", "num_mini_batches": 2, "stop_token": None}
    others |= {"bf16": False, "warmup_steps": 10, "save_total_limit": 3, "missing_eos_penalty": 1.0}
    others |= {"dataset_name": "prompts.csv", "stop_token_id": 7}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "total_episodes": 1000}
    settings = {**TRL_LAST, **TRL_MODEL, **sizes, "stop_token": "eos"}
    check_claims(from_trl, settings, others)
    switched_on = {"use_peft": True, "stop_token_id": 5, "stop_token": None, "bf16": False, "fp16": True}
    adapters = {"lora_dropout": 0.2, "lora_target_modules": "q_proj"}
    check_claims(from_trl, settings | switched_on, {**others, **adapters, "bf16": True, "stop_token": "eos"})


def test_without_settings_trls_own_defaults_are_written():
    conversion = from_trl({})
    values = conversion.parameters["ppo"]
    assert conversion.parameters["seed"] == TRL_LAST["seed"]
    assert conversion.missing == ["sft_model_path", "reward_model_path", "prompts_path"]  # no model that nobody named
    same_name = set(values) & set(TRL_LAST) - {"stop_token", "total_episodes"}
    assert {name: values[name] for name in same_name} == {name: TRL_LAST[name] for name in same_name}
    assert len(same_name) > 20
    assert (values["stop_token"], values["dtype"], values["value_model"]) == ("none", "bfloat16", "reward_init")
    assert conversion.not_carried == []


@pytest.mark.parametrize(
    ("bf16", "fp16", "dtype"),
    [(None, False, "bfloat16"), (None, True, "float16"), (False, False, "float32"), (False, True, "float16")],
)
def test_precision_follows_trls_rule_and_16_bits_are_remarked_on(bf16: bool | None, fp16: bool, dtype: str):
    conversion = from_trl({"kl_coef": 0.05, "bf16": bf16, "fp16": fp16})
    assert conversion.parameters["ppo"]["dtype"] == dtype
    assert any("computes in float32" in remark for remark in conversion.remarks) is (dtype != "float32")


def test_epochs_become_episodes_if_the_number_of_prompts_is_known():
    conversion = from_trl({"kl_coef": 0.05, "num_train_epochs": 2.5}, num_prompts=1001)
    assert conversion.parameters["ppo"]["total_episodes"] == 2502  # int(2.5 x 1001)
    assert set(reasons(num_train_epochs=2.5)) == {"num_train_epochs"}
    assert ppo(total_episodes=300, num_train_epochs=9)["total_episodes"] == 300  # as in TRL


def test_warm_up_steps_become_the_share_that_gives_as_many_iterations():
    # 1000 episodes in batches of 8 x 2: 63 iterations
    settings = {"total_episodes": 1000, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    for steps in (1, 31, 62, 63):
        config = from_trl({**settings, "warmup_steps": steps}).ppo_config()
        assert (config.num_total_batches, math.ceil(config.warmup_ratio * config.num_total_batches)) == (63, steps)


def test_warm_up_is_left_where_it_cannot_be_a_share():
    assert "warmup_steps" in reasons(warmup_steps=10)  # the number of iterations is not known
    assert "less than 1" in reasons(warmup_steps=200, total_episodes=1000)["warmup_steps"]
    assert ppo(warmup_steps=0.1)["warmup_ratio"] == 0.1
    assert ppo(warmup_ratio=0.2)["warmup_ratio"] == 0.2
    assert ppo(warmup_ratio=0.1, warmup_steps=0.2)["warmup_ratio"] == 0.2  # as in transformers


def test_the_constant_schedule_has_no_warm_up():
    given = {"lr_scheduler_type": "constant", "total_episodes": 1000, "warmup_ratio": 0.1, "warmup_steps": 5}
    assert from_trl(given).ppo_config().warmup_ratio == 0
    assert set(reasons(**given)) == {"warmup_ratio", "warmup_steps"}


def test_in_place_of_a_value_that_is_not_accepted_the_sources_default_is_written():
    conversion = from_trl(
        {"kl_coef": -1.0, "learning_rate": "fast", "lr_scheduler_type": "cosine_with_min_lr", "stop_token_id": "x"}
    )
    reason = dict(conversion.not_carried)
    assert set(reason) == {"kl_coef", "learning_rate", "lr_scheduler_type", "stop_token_id"}
    assert reason["kl_coef"] == "ppo.kl_coef does not accept -1.0: input should be greater than or equal to 0"
    values = conversion.parameters["ppo"]
    assert (values["kl_coef"], values["learning_rate"], values["lr_scheduler_type"]) == (0.05, 3e-6, "linear")
    assert conversion.origins["ppo.learning_rate"] == "default of learning_rate"
    assert values["stop_token_id"] is None


def test_a_setting_that_is_null_counts_as_not_given():
    conversion = from_trl({"kl_coef": None, "sft_model_path": None, "own_setting": None, "fsdp_config": {}})
    assert conversion.parameters == from_trl({}).parameters
    assert set(dict(conversion.not_carried)) == {"kl_coef"}  # whose default is no null
    assert "sft_model_path" in conversion.missing


@pytest.mark.parametrize(
    ("name", "value"), [("optim", ["adamw_torch"]), ("kl_penalty", ["kl"]), ("lora_target_modules", 5)]
)
def test_a_value_of_another_kind_than_the_source_has_is_listed(name: str, value: Any):
    assert "does not accept" in dict(from_trl({name: value, "use_peft": True}).not_carried)[name]


def test_a_penalty_for_a_missing_end_needs_a_stop_token():
    assert ppo(missing_eos_penalty=1.0, stop_token="eos")["missing_eos_penalty"] == 1.0
    assert ppo(missing_eos_penalty=1.0, stop_token_id=7)["missing_eos_penalty"] == 1.0
    assert ppo(missing_eos_penalty=1.0)["missing_eos_penalty"] is None
    assert set(reasons(missing_eos_penalty=1.0)) == {"missing_eos_penalty"}


def test_adapters_are_carried_only_with_use_peft():
    assert not any(name.startswith("lora") for name in ppo(lora_r=4))
    config = from_trl({"use_peft": True, "lora_r": 4, "lora_target_modules": ["q", "v"], "lora_dropout": 0.1})
    assert (config.ppo_config().lora_r, config.ppo_config().lora_alpha) == (4, TRL_MODEL["lora_alpha"])
    assert config.ppo_config().lora_target_modules == "q,v"
    assert set(dict(config.not_carried)) == {"lora_dropout"}
    peft_chooses = from_trl({"use_peft": True, "lora_target_modules": None})
    assert any("all-linear" in remark for remark in peft_chooses.remarks)
    assert reasons(use_peft=False, lora_r=4) == {"lora_r": "it has no effect with the other settings"}


def test_4_bit_weights_and_8_bit_moments_are_carried_and_other_ways_to_quantise_are_not():
    given = {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": False}
    conversion = from_trl({**given, "optim": "adamw_bnb_8bit"})
    config = conversion.ppo_config()
    assert (config.load_in_4bit, config.optim) == (True, "adamw_8bit")
    assert set(dict(conversion.not_carried)) == {"bnb_4bit_quant_type", "use_bnb_nested_quant"}
    assert any("reward model" in remark for remark in conversion.remarks)
    assert set(reasons(load_in_4bit=True, load_in_8bit=True)) == {"load_in_4bit", "load_in_8bit"}
    assert ppo(use_peft=True, optim="adamw_8bit")["optim"] == "adamw_8bit"


def test_other_settings_of_a_run_are_carried():
    values = ppo(save_steps=20, save_total_limit=3, use_cpu="True", full_determinism=True, torch_compile=True)
    assert (values["save_interval"], values["save_total_limit"], values["device"]) == (20, 3, "cpu")
    assert values["deterministic"] is values["compile"] is True
    with pytest.raises(ConfigError, match="use_cpu='maybe'"):
        ppo(use_cpu="maybe")


def test_enumerations_are_read_by_their_value():
    class Schedule(Enum):
        COSINE = "cosine"

    assert ppo(lr_scheduler_type=Schedule.COSINE)["lr_scheduler_type"] == "cosine"


def test_a_misspelt_setting_is_left_with_the_closest_name():
    assert reasons(num_ppo_epoch=3)["num_ppo_epoch"].endswith(" num_ppo_epochs")


def test_the_two_configurations_are_told_apart_and_not_mixed():
    assert from_trl(TRL_LEGACY).source == "TRL's legacy PPOConfig"
    assert from_trl(TRL_LAST).source == "TRL's PPOConfig"
    assert from_trl({"learning_rate": 1e-5, "batch_size": 64, "mini_batch_size": 8}).source == "TRL's legacy PPOConfig"
    with pytest.raises(ConfigError, match=r"ppo_epochs.*kl_coef"):
        from_trl({"ppo_epochs": 4, "kl_coef": 0.1, "target": 6})
    with pytest.raises(ConfigError, match="mapping"):
        from_trl([("kl_coef", 0.1)])  # type: ignore[arg-type]
