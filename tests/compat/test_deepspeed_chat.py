"""DeepSpeed-Chat's step 3: every option is accounted for, and a converted run does what the trainer would do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from ppo_rlhf.compat import Conversion, from_deepspeed_chat
from ppo_rlhf.core.errors import ConfigError
from tests.compat.bookkeeping import check_claims, check_each_setting_is_entered_once
from tests.compat.deepspeed_source import DEEPSPEED_CHAT, DEEPSPEED_CHAT_SWITCHES, DEEPSPEED_COMMAND

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


@pytest.mark.parametrize("form", ["arguments", "mapping"])
def test_every_option_is_carried_or_left_once(form: str):
    settings = {name: "1" if value is None else value for name, value in DEEPSPEED_CHAT.items()}
    settings |= PATHS | dict.fromkeys(DEEPSPEED_CHAT_SWITCHES.split(), True)
    conversion = from_deepspeed_chat(arguments(settings) if form == "arguments" else settings)
    check_each_setting_is_entered_once(conversion, settings)
    assert not any("no such setting" in reason for _, reason in conversion.not_carried)
    assert reasons(align_overflow=True)["align_overflow"].startswith("always so")


def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one():
    others = {"lr_scheduler_type": "linear", "dtype": "bf16", "data_path": ["prompts.jsonl"]}
    others |= {"per_device_training_batch_size": 8}

    def with_prompts(settings: Mapping[str, Any]) -> Conversion:
        return from_deepspeed_chat(arguments(settings), num_prompts=10_000)

    given = {name: value for name, value in DEEPSPEED_CHAT.items() if value is not None}
    check_claims(with_prompts, given | PATHS | {"seed": 1}, others)
    adapters = {"actor_lora_dim": 8, "critic_lora_dim": 8, "critic_lora_learning_rate": 1e-3}
    check_claims(with_prompts, PATHS | adapters | {"actor_lora_learning_rate": 1e-3}, {})


def test_the_shipped_script_is_converted_as_worked_by_hand():
    conversion = from_deepspeed_chat(DEEPSPEED_COMMAND, num_prompts=30_000)
    assert conversion.parameters == {
        "seed": 1234,
        "sft_model_path": "models/actor",
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
            "ema_decay": 0.992,
        },
    }
    left = {"data_path", "num_padding_at_beginning", "enable_hybrid_engine", "actor_dropout", "launcher.master_port"}
    assert left <= set(dict(conversion.not_carried))
    config = conversion.ppo_config()
    assert math.ceil(config.warmup_ratio * config.num_total_batches) == 100


@pytest.mark.parametrize(
    ("generation", "training", "batches", "accumulation", "expected"),
    [
        # responses of an iteration, of a step, of a backward pass
        (16, 16, 1, 1, (16, 16, 16)),
        (16, 4, 2, 2, (32, 8, 4)),
        (4, 16, 1, 1, (4, 4, 4)),  # a generated batch smaller than the training batch is trained on whole
        (16, 16, 1, 2, (32, 32, 16)),  # a step needs two generated batches
        (8, 4, 3, 4, (48, 16, 4)),  # 24 generated, steps of 16: 48 is the first common end
    ],
)
def test_batch_sizes_give_the_same_steps(
    generation: int, training: int, batches: int, accumulation: int, expected: tuple[int, int, int]
):
    conversion = convert(
        per_device_generation_batch_size=generation,
        per_device_training_batch_size=training,
        generation_batches=batches,
        gradient_accumulation_steps=accumulation,
    )
    config = conversion.ppo_config()
    assert (config.batch_size, config.mini_batch_size, config.local_micro_batch_size) == expected
    assert config.local_rollout_forward_batch_size == generation
    grown = config.batch_size != generation * batches
    assert any("accumulates" in remark for remark in conversion.remarks) is grown


def test_the_warm_up_is_a_share_of_the_updates():
    settings = arguments(PATHS | {"ppo_epochs": 2, "num_warmup_steps": 10, "num_train_epochs": 3})
    # 160 prompts, 3 epochs: 480 episodes in iterations of 16, two updates each
    values = from_deepspeed_chat(settings, num_prompts=160).parameters["ppo"]
    assert (values["total_episodes"], values["warmup_ratio"]) == (480, 10 / 60)
    assert {"num_train_epochs", "num_warmup_steps"} <= set(dict(from_deepspeed_chat(settings).not_carried))
    left = reasons(lr_scheduler_type="constant", num_warmup_steps=10)["num_warmup_steps"]
    assert left == "it has no effect with lr_scheduler_type=constant"


def test_with_adapters_the_adapters_learning_rate_is_the_one_that_counts():
    values = ppo(actor_lora_dim=64, critic_lora_dim=64, only_optimize_lora=True, actor_lora_learning_rate=1e-4)
    assert (values["use_peft"], values["lora_r"], values["lora_alpha"]) == (True, 64, 1)
    assert (values["learning_rate"], values["value_learning_rate"]) == (1e-4, 5e-4)
    assert "actor_learning_rate" in reasons(actor_lora_dim=64, actor_learning_rate=1e-5)


def test_settings_of_the_critic_that_are_the_actors_here_are_left():
    given = {"actor_lora_dim": 64, "critic_lora_dim": 32, "actor_weight_decay": 0.1, "critic_weight_decay": 0.2}
    assert (ppo(**given)["lora_r"], ppo(**given)["weight_decay"]) == (64, 0.1)
    assert set(reasons(**given)) == {"critic_lora_dim", "critic_weight_decay"}
    assert any("the actor's rank" in remark for remark in convert(**given).remarks)


def test_switches_are_carried():
    values = ppo(actor_gradient_checkpointing=True, enable_ema=True, gradient_accumulation_steps=2, dtype="bf16")
    assert values["ema_decay"] == pytest.approx(0.992**2, abs=1e-6)  # averaged twice a step there
    assert (values["dtype"], values["gradient_checkpointing"]) == ("bfloat16", True)


def test_in_place_of_a_value_that_is_not_accepted_the_sources_default_is_written():
    conversion = convert(ppo_epochs="x", lr_scheduler_type="cosine_with_hard_stops", dtype="fp8")
    values = conversion.parameters["ppo"]
    assert (values["num_ppo_epochs"], values["lr_scheduler_type"], values["dtype"]) == (1, "cosine", "float16")
    assert conversion.origins["ppo.num_ppo_epochs"] == "default of ppo_epochs"


def test_what_the_command_does_not_name_is_to_be_filled_in():
    assert from_deepspeed_chat(["--ppo_epochs", "1"]).missing == ["sft_model_path", "reward_model_path", "prompts_path"]
    assert convert(data_path="prompts.jsonl").missing == []


@pytest.mark.parametrize(
    "given",
    [
        ["--seed", "3", "--dtype=bf16", "--data_path", "a", "b", "--enable_ema"],
        ["deepspeed", "path/to/main.py", "--seed=3", "--dtype", "bf16", "--enable_ema", "--data_path", "a", "b"],
        {"seed": 3, "dtype": "bf16", "data_path": ["a", "b"], "enable_ema": True},
    ],
)
def test_every_way_of_giving_the_options_gives_the_same_parameters(given: Any):
    conversion = from_deepspeed_chat(given)
    values = conversion.parameters
    assert (values["seed"], values["ppo"]["dtype"], values["ppo"]["ema_decay"]) == (3, "bfloat16", 0.992)
    assert set(dict(conversion.not_carried)) == {"data_path"}


def test_an_unknown_option_has_the_closest_name():
    conversion = from_deepspeed_chat(["main.py", "--actor_learning_rte", "1e-5"])
    assert dict(conversion.not_carried)["actor_learning_rte"].endswith("the closest is actor_learning_rate")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("main.py --seed", "seed"),
        ("run.sh", "run.sh"),
        ("main.py --per_device_training_batch_size two", "per_device_training_batch_size='two'"),
        ("main.py --generation_batches 0", "generation_batches='0'"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused_in_one_line(given: str, named: str):
    with pytest.raises(ConfigError, match=named) as caught:
        from_deepspeed_chat(given.split())
    assert len(str(caught.value).splitlines()) == 1
