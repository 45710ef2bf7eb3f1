"""DeepSpeed-Chat's step 3: every option is accounted for, and a converted run does what the trainer would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ppo_rlhf.compat import Conversion, from_deepspeed_chat
from ppo_rlhf.core.errors import ConfigError
from tests.compat.bookkeeping import check_claims, check_each_setting_is_entered_once
from tests.compat.deepspeed_source import (
    DEEPSPEED_CHAT,
    DEEPSPEED_CHAT_OLDER_NAMES,
    DEEPSPEED_CHAT_SWITCHES,
    DEEPSPEED_SCRIPT,
)

PATHS = {"actor_model_name_or_path": "actor", "critic_model_name_or_path": "critic"}


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as a command line: switches by True, absent by None or False."""
    words = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def convert(**settings: Any) -> Conversion:
    return from_deepspeed_chat(arguments(PATHS | settings))


def ppo(**settings: Any) -> dict[str, Any]:
    return convert(**settings).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(convert(**settings).not_carried)


def full_command() -> dict[str, Any]:
    """Every option, with some value where it has no default."""
    values = {name: "1" if value is None else value for name, value in DEEPSPEED_CHAT.items()}
    return values | PATHS | dict.fromkeys(DEEPSPEED_CHAT_SWITCHES, True)


def test_every_option_is_carried_or_left_once():
    settings = full_command()
    conversion = from_deepspeed_chat(arguments(settings))
    check_each_setting_is_entered_once(conversion, settings)
    assert not any("not a setting" in reason for _, reason in conversion.not_carried)


@pytest.mark.parametrize("name", DEEPSPEED_CHAT_OLDER_NAMES)
def test_options_of_the_first_releases_are_known_by_the_name_they_were_given(name: str):
    conversion = convert(**{name: True if name.startswith("disable") else 4})
    check_each_setting_is_entered_once(conversion, PATHS | {name: 4})
    assert not any("not a setting" in reason for _, reason in conversion.not_carried)


def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one():
    other_values = {
        "lr_scheduler_type": "linear",
        "dtype": "bf16",
        "data_path": ["prompts.jsonl"],
        "per_device_training_batch_size": 8,
    }

    def with_prompts(settings: Mapping[str, Any]) -> Conversion:
        return from_deepspeed_chat(arguments(settings), num_prompts=10_000)

    # one weight decay is for both models: whether the critic's is carried depends on the actor's (tested below)
    given = {name: value for name, value in DEEPSPEED_CHAT.items() if value is not None and "critic_weight" not in name}
    check_claims(with_prompts, given | PATHS | {"seed": 1}, other_values)
    adapters = {"actor_lora_dim": 8, "critic_lora_dim": 8, "critic_lora_learning_rate": 1e-3}
    check_claims(with_prompts, PATHS | adapters | {"actor_lora_learning_rate": 1e-3}, {"critic_lora_dim": 0})


def test_the_shipped_script_is_converted_as_worked_by_hand():
    conversion = from_deepspeed_chat(DEEPSPEED_SCRIPT, num_prompts=30_000)
    assert conversion.parameters == {
        "seed": 1234,
        "reward_model_path": "AdamG012/chat-opt-350m-reward-deepspeed",
        "ppo": {
            "num_ppo_epochs": 1,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 1.0,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
            "whiten_advantages": False,
            "kl_coef": 0.1,
            "kl_estimator": "k1",
            "kl_in": "reward",
            "kl_controller": "fixed",
            "reward_clip": 5.0,
            "missing_eos_penalty": None,
            "learning_rate": 9.65e-6,
            "value_learning_rate": 5e-6,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 100 / 7500,  # 30,000 prompts in updates of 4
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "total_episodes": 30_000,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "num_mini_batches": 1,
            "local_rollout_forward_batch_size": 4,
            "response_length": 256,
            "temperature": 1.0,
            "stop_token": "eos",
            "overlong_prompts": "drop",
            "value_model": "reward_init",
            "dtype": "float16",
            "use_peft": False,
            "gradient_checkpointing": False,
            "ema_decay": 0.992,
        },
    }
    left = dict(conversion.not_carried)
    assert left["actor_model_name_or_path"] == "$ACTOR_MODEL_PATH is a shell variable without a value in the text"
    assert left["master_port"].startswith("an option of the launcher")
    assert {"data_path", "num_padding_at_beginning", "enable_hybrid_engine", "actor_dropout"} <= set(left)
    assert conversion.ppo_config().warmup_iterations == 100


@pytest.mark.parametrize(
    ("generation", "training", "batches", "accumulation", "expected"),
    [
        # responses of an iteration, of a step, of a backward pass
        (16, 16, 1, 1, (16, 16, 16)),
        (16, 4, 1, 1, (16, 4, 4)),
        (16, 4, 2, 2, (32, 8, 4)),
        (4, 16, 1, 1, (4, 4, 4)),  # a generated batch smaller than the training batch is trained on whole
        (16, 16, 1, 2, (32, 32, 16)),  # a step needs two generated batches
        (8, 4, 3, 4, (48, 16, 4)),  # 24 generated, steps of 16: 48 is the first common end
    ],
)
def test_batch_sizes_give_the_same_steps(
    generation: int, training: int, batches: int, accumulation: int, expected: tuple[int, int, int]
):
    config = convert(
        per_device_generation_batch_size=generation,
        per_device_training_batch_size=training,
        generation_batches=batches,
        gradient_accumulation_steps=accumulation,
    ).ppo_config()
    assert (config.batch_size, config.mini_batch_size, config.local_micro_batch_size) == expected
    assert config.local_rollout_forward_batch_size == generation


def test_accumulation_over_generated_batches_is_remarked_on():
    def remarks(**settings: int) -> list[str]:
        return [remark for remark in convert(**settings).remarks if "accumulates" in remark]

    assert remarks() == []
    assert remarks(gradient_accumulation_steps=2) == [
        "DeepSpeed accumulates gradients over batches of 16 responses until it has 32 for a step; here an iteration "
        "generates 32 responses before its one step, which is the same."
    ]
    assert remarks(gradient_accumulation_steps=2, ppo_epochs=2)[0].endswith("and its steps end with it.")


def test_the_warm_up_is_a_share_of_the_updates():
    settings = arguments(PATHS | {"ppo_epochs": 2, "num_warmup_steps": 10, "num_train_epochs": 3})
    # 160 prompts, 3 epochs: 480 episodes in iterations of 16, two updates each
    assert from_deepspeed_chat(settings, num_prompts=160).parameters["ppo"]["warmup_ratio"] == 10 / 60
    left = dict(from_deepspeed_chat(settings).not_carried)
    assert {"num_train_epochs", "num_warmup_steps"} <= set(left)
    constant = convert(lr_scheduler_type="constant", num_warmup_steps=10)
    assert "no warm-up" in dict(constant.not_carried)["num_warmup_steps"]


def test_with_adapters_the_adapters_learning_rate_is_the_one_that_counts():
    values = ppo(actor_lora_dim=64, critic_lora_dim=64, only_optimize_lora=True, actor_lora_learning_rate=1e-4)
    assert (values["use_peft"], values["lora_r"], values["lora_alpha"]) == (True, 64, 1)
    assert (values["learning_rate"], values["value_learning_rate"]) == (1e-4, 5e-4)
    assert "only the adapter trains" in reasons(actor_lora_dim=64, actor_learning_rate=1e-5)["actor_learning_rate"]


def test_adapters_of_two_sizes_are_left_for_the_critic():
    assert ppo(actor_lora_dim=64, critic_lora_dim=32)["lora_r"] == 64
    assert "one rank" in reasons(actor_lora_dim=64, critic_lora_dim=32)["critic_lora_dim"]
    assert "on both models or on none" in reasons(critic_lora_dim=32)["critic_lora_dim"]


def test_two_weight_decays_cannot_both_be_carried():
    assert ppo(actor_weight_decay=0.1, critic_weight_decay=0.1)["weight_decay"] == 0.1
    assert ppo(actor_weight_decay=0.1, critic_weight_decay=0.2)["weight_decay"] == 0.1
    assert set(reasons(actor_weight_decay=0.1, critic_weight_decay=0.2)) == {"critic_weight_decay"}


def test_switches_are_carried():
    values = ppo(align_overflow=True, enable_ema=True, gradient_accumulation_steps=2, dtype="bf16")
    assert values["align_overflow"] is True
    assert values["ema_decay"] == pytest.approx(0.992**2, abs=1e-6)  # averaged twice a step there
    assert values["dtype"] == "bfloat16"
    assert ppo(critic_gradient_checkpointing=True)["gradient_checkpointing"] is True


def test_in_place_of_a_value_that_is_not_accepted_the_sources_default_is_written():
    values = ppo(ppo_epochs="x", lr_scheduler_type="cosine_with_hard_stops", dtype="fp8")
    assert values["num_ppo_epochs"] == 1
    assert values["lr_scheduler_type"] == "cosine"
    assert values["dtype"] == "float16"
    assert reasons(ppo_epochs="x")["ppo_epochs"].startswith("ppo.num_ppo_epochs does not take 'x': ")
    assert convert(ppo_epochs="x").origins["ppo.num_ppo_epochs"] == "default of ppo_epochs"


def test_an_unknown_option_is_left_with_the_closest_name():
    assert reasons(actor_learning_rte=1e-5)["actor_learning_rte"] == (
        "not a setting of DeepSpeed-Chat's step 3; the closest is actor_learning_rate"
    )


def test_missing_models_are_remarked_on():
    remarks = from_deepspeed_chat("main.py --ppo_epochs 1").remarks
    assert remarks[:2] == [
        "There is no --actor_model_name_or_path with a value: set sft_model_path.",
        "There is no --critic_model_name_or_path with a value: set reward_model_path.",
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--per_device_training_batch_size two", "DeepSpeed-Chat's step 3: per_device_training_batch_size='two': "),
        ("--generation_batches 0", "DeepSpeed-Chat's step 3: generation_batches='0': "),
        (
            "--generation_batches 1 --generation_batch_numbers 1",
            "--generation_batch_numbers is an older name of --generation_batches: give one of them.",
        ),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(given: str, expected: str):
    with pytest.raises(ConfigError) as caught:
        from_deepspeed_chat(given)
    assert str(caught.value).startswith(expected)
