"""TRL's last PPOConfig: every setting is accounted for, and a converted run does what TRL's would do."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from ppo_rlhf.compat import from_trl
from ppo_rlhf.compat.trl_last import share_of
from ppo_rlhf.core.errors import ConfigError
from tests.compat.bookkeeping import check_claims, check_each_setting_is_entered_once
from tests.compat.trl_source import TRL_LAST, TRL_LEGACY, TRL_MODEL, TRL_OLDER_NAMES


def ppo(**settings: Any) -> dict[str, Any]:
    return from_trl({"kl_coef": 0.05, **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_trl({"kl_coef": 0.05, **settings}).not_carried)


def test_every_field_of_the_configuration_and_of_the_scripts_is_carried_or_left_once():
    settings = {**TRL_LAST, **TRL_MODEL, **dict.fromkeys(TRL_OLDER_NAMES)}
    conversion = from_trl(settings)
    check_each_setting_is_entered_once(conversion, settings)
    assert not any("not a setting" in reason for _, reason in conversion.not_carried)


def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one():
    other_values = {
        "kl_estimator": "k3",
        "gamma": 0.9,
        "lam": 0.9,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch",
        "num_mini_batches": 2,
        "stop_token": None,
        "bf16": False,
        "warmup_steps": 10,
        "save_total_limit": 3,
        "missing_eos_penalty": 1.0,
        "dataset_name": "prompts.csv",
    }
    settings = {**TRL_LAST, **TRL_MODEL, "total_episodes": 1000, "stop_token": "eos"}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    check_claims(from_trl, settings | sizes, other_values)
    with_more_read = {"use_peft": True, "stop_token_id": 5, "stop_token": None, "bf16": False, "fp16": True}
    adapters = {"lora_dropout": 0.2, "lora_target_modules": "q_proj"}
    check_claims(
        from_trl, settings | sizes | with_more_read, {**other_values, **adapters, "bf16": True, "stop_token": "eos"}
    )


def test_without_settings_trls_own_defaults_are_written():
    conversion = from_trl({})
    values = conversion.parameters["ppo"]
    assert {name: conversion.parameters[name] for name in ("seed", "sft_model_path", "reward_model_path")} == {
        "seed": 42,
        "sft_model_path": "EleutherAI/pythia-160m",
        "reward_model_path": "EleutherAI/pythia-160m",
    }
    same_name = set(values) & set(TRL_LAST) - {"stop_token", "total_episodes"}
    assert {name: values[name] for name in same_name} == {name: TRL_LAST[name] for name in same_name}
    assert len(same_name) > 20
    assert values["stop_token"] == "none"  # None never stops
    assert values["dtype"] == "bfloat16"  # bf16 unless fp16
    assert values["value_model"] == "reward_init"
    assert conversion.not_carried == []


@pytest.mark.parametrize(
    ("bf16", "fp16", "dtype"),
    [
        (None, False, "bfloat16"),
        (None, True, "float16"),
        (False, False, "float32"),
        (True, False, "bfloat16"),
        (False, True, "float16"),
    ],
)
def test_precision_follows_trls_rule(bf16: bool | None, fp16: bool, dtype: str):
    assert ppo(bf16=bf16, fp16=fp16)["dtype"] == dtype


@pytest.mark.parametrize(("bf16", "fp16", "said"), [(None, False, True), (False, True, True), (False, False, False)])
def test_sixteen_bits_are_remarked_on_since_trls_ppo_does_not_compute_in_them(
    bf16: bool | None, fp16: bool, said: bool
):
    remarks = from_trl({"kl_coef": 0.05, "bf16": bf16, "fp16": fp16}).remarks
    assert any("computes in float32" in remark for remark in remarks) is said


def test_epochs_become_episodes_if_the_number_of_prompts_is_known():
    conversion = from_trl({"kl_coef": 0.05, "num_train_epochs": 2.5}, num_prompts=1001)
    assert conversion.parameters["ppo"]["total_episodes"] == 2502  # int(2.5 x 1001)
    unknown = from_trl({"kl_coef": 0.05, "num_train_epochs": 2.5})
    assert [setting for setting, _ in unknown.not_carried] == ["num_train_epochs"]
    assert any("ppo.total_episodes" in remark for remark in unknown.remarks)


def test_total_episodes_wins_over_epochs_as_in_trl():
    assert ppo(total_episodes=300, num_train_epochs=9)["total_episodes"] == 300
    assert reasons(total_episodes=300, num_train_epochs=9) == {
        "num_train_epochs": "total_episodes is set: TRL does not read it"
    }


def test_warm_up_steps_become_the_share_that_gives_as_many_iterations():
    # 1000 episodes in batches of 8 x 2: 63 iterations
    settings = {"total_episodes": 1000, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    for steps in range(1, 63):
        config = from_trl({**settings, "warmup_steps": steps}).ppo_config()
        assert (config.num_total_batches, config.warmup_iterations) == (63, steps)


def test_a_share_is_rounded_up_to_the_steps_it_came_from():
    import math

    assert all(math.ceil(share_of(k, n) * n) == k for n in range(1, 200) for k in range(1, n + 1))


def test_warm_up_is_left_where_it_cannot_be_a_share():
    assert "not known" in reasons(warmup_steps=10)["warmup_steps"]
    assert "no warm-up" in reasons(warmup_steps=10, lr_scheduler_type="constant", total_episodes=1000)["warmup_steps"]
    assert "less than 1" in reasons(warmup_steps=200, total_episodes=1000)["warmup_steps"]
    assert ppo(warmup_steps=0.1)["warmup_ratio"] == 0.1
    assert ppo(warmup_ratio=0.2)["warmup_ratio"] == 0.2


def test_what_is_said_of_a_warm_up_ratio_is_true():
    assert not any("warmup_ratio" in remark for remark in from_trl({"kl_coef": 0.1, "warmup_ratio": 0.1}).remarks)
    assert reasons(warmup_ratio=0.1, warmup_steps=0.2) == {
        "warmup_ratio": "warmup_steps is set: transformers does not read it"
    }
    assert reasons(warmup_ratio=None) == {"warmup_ratio": "None: warmup_steps counts"}


def test_the_constant_schedule_has_no_warm_up_whichever_setting_asks_for_one():
    given = {"lr_scheduler_type": "constant", "total_episodes": 1000, "warmup_ratio": 0.1, "warmup_steps": 0}
    reason = "transformers' constant schedule has no warm-up"
    assert from_trl(given).ppo_config().warmup_iterations == 0
    assert reasons(**given) == dict.fromkeys(("warmup_ratio", "warmup_steps"), reason)


def test_in_place_of_a_value_that_is_not_accepted_the_sources_default_is_written():
    conversion = from_trl({"kl_coef": -1.0, "learning_rate": "fast", "sft_model_path": None})
    assert {setting for setting, _ in conversion.not_carried} == {"kl_coef", "learning_rate", "sft_model_path"}
    assert conversion.parameters["ppo"]["kl_coef"] == 0.05
    assert conversion.parameters["ppo"]["learning_rate"] == 3e-6
    assert conversion.origins["ppo.learning_rate"] == "default of learning_rate"
    assert "sft_model_path" not in conversion.parameters  # None names no model, and not the default's either


def test_a_penalty_for_a_missing_end_needs_a_stop_token():
    assert ppo(missing_eos_penalty=1.0, stop_token="eos")["missing_eos_penalty"] == 1.0
    assert ppo(missing_eos_penalty=1.0, stop_token_id=7)["missing_eos_penalty"] == 1.0
    assert ppo(missing_eos_penalty=1.0)["missing_eos_penalty"] is None
    assert set(reasons(missing_eos_penalty=1.0)) == {"missing_eos_penalty"}
    from_trl({"kl_coef": 0.05, "missing_eos_penalty": 1.0}).ppo_config()  # and the whole is accepted


def test_minibatches_under_accumulation_are_remarked_on_since_trl_steps_less_often():
    def remarked(**settings: int) -> bool:
        return any("one optimiser step" in remark for remark in from_trl({"kl_coef": 0.05, **settings}).remarks)

    assert remarked(num_mini_batches=2, gradient_accumulation_steps=2)
    assert not remarked(num_mini_batches=2)
    assert not remarked(gradient_accumulation_steps=2)


def test_checkpoints_follow_save_steps_only_where_trl_reads_them():
    assert ppo(save_steps=20)["save_interval"] == 20
    assert "save_interval" not in ppo(save_steps=20, save_strategy="no")
    assert "does not read" in reasons(save_steps=20, save_strategy="no")["save_steps"]
    assert "save_interval does not take 0.1" in reasons(save_steps=0.1)["save_steps"]


def test_adapters_are_carried_only_with_use_peft_and_then_with_trls_defaults():
    assert not any(name.startswith("lora") for name in ppo(lora_r=4))
    assert "use_peft" in reasons(lora_r=4)["lora_r"]
    values = ppo(use_peft=True, lora_r=4)
    assert (values["use_peft"], values["lora_r"], values["lora_alpha"]) == (True, 4, 32)
    assert "lora_target_modules" not in values


def test_target_modules_are_carried_as_one_text_and_the_choice_of_peft_is_left():
    assert ppo(use_peft=True, lora_target_modules=["q_proj", "v_proj"])["lora_target_modules"] == "q_proj,v_proj"
    assert ppo(use_peft=True, lora_target_modules="all-linear")["lora_target_modules"] == "all-linear"
    assert "all-linear" in reasons(use_peft=True, lora_target_modules=None)["lora_target_modules"]


def test_dropout_of_adapters_is_left_since_it_is_always_off():
    assert reasons(use_peft=True, lora_dropout=0.1)["lora_dropout"] == "dropout is always off"
    from_trl({"kl_coef": 0.05, "use_peft": True, "lora_dropout": 0.1}).ppo_config()  # and the whole is accepted


def test_a_schedule_that_is_not_offered_is_left_with_those_that_are():
    reason = reasons(lr_scheduler_type="cosine_with_min_lr")["lr_scheduler_type"]
    assert reason.startswith("ppo.lr_scheduler_type does not take 'cosine_with_min_lr'")
    assert "'cosine'" in reason


def test_enumerations_are_read_by_their_value():
    class Schedule(Enum):
        COSINE = "cosine"

    assert ppo(lr_scheduler_type=Schedule.COSINE)["lr_scheduler_type"] == "cosine"


def test_a_misspelt_setting_is_left_with_the_closest_name():
    assert reasons(num_ppo_epoch=3) == {
        "num_ppo_epoch": "not a setting of TRL's PPOConfig; the closest is num_ppo_epochs"
    }


def test_a_configuration_of_both_kinds_is_refused_and_names_settings_of_each():
    with pytest.raises(ConfigError) as caught:
        from_trl({"ppo_epochs": 4, "kl_coef": 0.1, "target": 6})
    assert str(caught.value) == (
        "ppo_epochs, target belong to TRL's legacy PPOConfig and kl_coef to its last: give the settings of one of them."
    )


def test_full_configurations_are_told_apart():
    assert from_trl(TRL_LEGACY).source == "TRL's legacy PPOConfig"
    assert from_trl(TRL_LAST).source == "TRL's PPOConfig"
    assert from_trl({"learning_rate": 1e-5, "batch_size": 64, "mini_batch_size": 8}).source == "TRL's legacy PPOConfig"


def test_something_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match=r"a mapping of names to values, got list"):
        from_trl([("kl_coef", 0.1)])  # type: ignore[arg-type]
