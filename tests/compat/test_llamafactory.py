"""LLaMA-Factory's stages ppo, sft and rm: a run does what theirs would."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ppo_rlhf.compat import from_llamafactory
from ppo_rlhf.compat.conversion import texts_of
from ppo_rlhf.core.errors import ConfigError

LORA = {
    **{"stage": "ppo", "do_train": True, "finetuning_type": "lora", "lora_rank": 16, "lora_target": "q_proj, v_proj"},
    **{"model_name_or_path": "org/base", "reward_model": "saves/reward", "template": "qwen", "cutoff_len": 512},
    **{"dataset": "questions", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    **{"ppo_buffer_size": 3, "ppo_epochs": 2, "ppo_target": 3.0, "learning_rate": 2e-5, "num_train_epochs": 2.0},
    **{
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "bf16": True,
        "max_new_tokens": 256,
        "top_k": 0,
        "top_p": 0.9,
    },
    "output_dir": "saves/ppo",
}
"""A file for PPO with LoRA, with the settings that such files have."""


def ppo(**settings: Any) -> dict[str, Any]:
    return from_llamafactory({"stage": "ppo", **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_llamafactory({"stage": "ppo", **settings}).not_carried)


def test_a_file_for_ppo_with_lora_is_converted_as_worked_by_hand():
    conversion = from_llamafactory(LORA, num_prompts=100)
    assert conversion.parameters == {
        "seed": 42,
        "sft_model_path": "org/base",
        "reward_model_path": "saves/reward",
        "ppo": {
            "num_ppo_epochs": 2,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
            "whiten_advantages": True,
            "target_kl": None,
            "kl_coef": 0.2,
            "kl_estimator": "k1",
            "kl_in": "reward",
            "kl_controller": "adaptive",
            "kl_target": 3.0,
            "kl_horizon": 10_000.0,
            "reward_clip": None,
            "reward_normalisation": "none",
            "missing_eos_penalty": None,
            "learning_rate": 2e-5,
            "value_learning_rate": None,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "total_episodes": 192,  # 100 prompts fill 4 iterations of 24; two passes
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 6,  # 6 x 4 = 24 responses an iteration
            "num_mini_batches": 3,  # steps on 4 x 2 responses
            "response_length": 256,
            "temperature": 0.95,
            "top_k": 0,
            "top_p": 0.9,
            "stop_token": "eos",
            "value_model": "shared",
            "use_peft": True,
            "lora_r": 16,
            "lora_alpha": 32,  # twice the rank
            "lora_target_modules": "q_proj,v_proj",
            "load_in_4bit": False,
            "gradient_checkpointing": True,
            "dtype": "bfloat16",
            "device": "auto",
        },
    }
    left = {"do_train", "template", "cutoff_len", "dataset", "output_dir", "reward_model_type"} & set(LORA)
    assert {setting for setting, _ in conversion.not_carried} == left
    assert conversion.missing == ["prompts_path"]
    config = conversion.ppo_config()
    assert (config.batch_size, config.batch_size // config.num_mini_batches) == (24, 8)


@pytest.mark.parametrize(("rows", "epochs", "episodes"), [(100, 1.0, 96), (100, 2.5, 240), (24, 1, 24), (47, 0.5, 24)])
def test_a_pass_leaves_out_the_prompts_that_do_not_fill_an_iteration(rows: int, epochs: float, episodes: int):
    """TRL's data loader drops the last batch; max_steps = ceil(epochs x batches)."""
    conversion = from_llamafactory({**LORA, "num_train_epochs": epochs}, num_prompts=rows)
    assert conversion.parameters["ppo"]["total_episodes"] == episodes
    with pytest.raises(ConfigError, match=r"23 prompts.* 24"):
        from_llamafactory(LORA, num_prompts=23)


def test_steps_are_iterations_and_replace_the_passes():
    values = ppo(
        max_steps=10, num_train_epochs=3, warmup_steps=2, gradient_accumulation_steps=2, lr_scheduler_type="cosine"
    )
    assert values["total_episodes"] == 10 * 16
    assert values["warmup_ratio"] * 10 == pytest.approx(1.5)  # rounded up: 2 iterations
    assert set(reasons(max_steps=10, num_train_epochs=3)) == {"num_train_epochs"}
    assert "num_train_epochs" in reasons(num_train_epochs=3, max_steps=-1)
    assert ppo(warmup_steps=0.25)["warmup_ratio"] == 0.25
    assert "warmup_steps" in reasons(warmup_steps=20)


def test_scores_are_normalised_by_a_running_mean_and_deviation():
    assert ppo(ppo_score_norm=True)["reward_normalisation"] == "running"


@pytest.mark.parametrize(
    ("settings", "globals_", "left"),
    [
        ({"reward_model": "r"}, {"reward_model_path": "r"}, set()),
        ({"reward_model": "r", "reward_model_type": "full"}, {"reward_model_path": "r"}, {"reward_model_type"}),
        (
            {"reward_model": "r", "reward_model_type": "full", "reward_model_adapters": "a"},
            {"reward_model_path": "a"},
            {"reward_model"},
        ),
        (
            {"reward_model": "r", "reward_model_type": "full", "reward_model_adapters": "a,b"},
            {},
            {"reward_model", "reward_model_adapters"},
        ),
        (
            {"reward_model": "http://localhost:8000/v1/score", "reward_model_type": "api"},
            {"reward_components": [{"type": "function", "function": "reward_server:score"}]},
            set(),
        ),
        ({"reward_model": "r", "reward_model_type": "oft"}, {}, {"reward_model", "reward_model_type"}),
        ({"adapter_name_or_path": "a", "model_name_or_path": "m"}, {"sft_model_path": "a"}, {"model_name_or_path"}),
        (
            {"adapter_name_or_path": "a, b", "model_name_or_path": "m"},
            {},
            {"model_name_or_path", "adapter_name_or_path"},
        ),
        (
            {"adapter_name_or_path": "a", "create_new_adapter": True, "reward_model": "r", "reward_model_type": "lora"},
            {"sft_model_path": "a"},
            {"create_new_adapter", "reward_model", "reward_model_type"},
        ),
        ({"adapter_name_or_path": "a", "reward_model": "r"}, {"sft_model_path": "a", "reward_model_path": "r"}, set()),
        ({"model_name_or_path": "m/n", "model_revision": "v2"}, {"sft_model_path": "m/n@v2"}, set()),
        ({"trust_remote_code": True}, {"trust_remote_code": True}, set()),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, set()),
    ],
)
def test_models_become_globals(settings: dict[str, Any], globals_: dict[str, Any], left: set[str]):
    conversion = from_llamafactory({"stage": "ppo", **settings})
    assert {name: value for name, value in conversion.globals.items() if name != "seed"} == globals_
    assert set(dict(conversion.not_carried)) == left
    assert any("given adapter" in each for each in conversion.remarks) == (
        "adapter_name_or_path" in settings and "create_new_adapter" not in settings
    )


def test_a_reward_server_needs_no_reward_model():
    conversion = from_llamafactory({"stage": "ppo", "reward_model": "http://host/score", "reward_model_type": "api"})
    assert "reward_model_path" not in conversion.missing
    assert any("http://host/score" in remark and "reward_server.py" in remark for remark in conversion.remarks)


@pytest.mark.parametrize(
    ("settings", "loads", "left"),
    [
        ({"quantization_bit": 4}, True, set()),
        ({"quantization_bit": 8}, False, {"quantization_bit"}),
        ({"quantization_bit": 4, "adapter_name_or_path": "a"}, False, {"quantization_bit"}),
        ({"quantization_bit": 4, "quantization_type": "fp4"}, True, {"quantization_type"}),
    ],
)
def test_quantised_weights_have_four_bits_and_no_adapter_of_their_own(
    settings: dict[str, Any], loads: bool, left: set[str]
):
    assert ppo(**settings)["load_in_4bit"] is loads
    assert set(reasons(**settings)) == left


def test_all_weights_train_with_full_and_other_kinds_are_left():
    assert {"use_peft", "lora_r", "load_in_4bit"} & ppo(finetuning_type="full").keys() == {"use_peft"}
    assert ppo(finetuning_type="full")["use_peft"] is False
    assert ppo(finetuning_type="freeze")["use_peft"] is True
    assert "finetuning_type" in reasons(finetuning_type="freeze")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16"), ({"pure_bf16": True}, "bfloat16")],
)
def test_precision(settings: dict[str, bool], dtype: str):
    assert ppo(**settings)["dtype"] == dtype


def test_a_response_length_is_that_of_the_response_alone():
    assert ppo(max_new_tokens=7)["response_length"] == 7
    assert ppo(max_new_tokens=0, max_length=50)["response_length"] == 1024
    assert set(reasons(max_new_tokens=0, max_length=50)) == {"max_new_tokens", "max_length"}


@pytest.mark.parametrize("stage", ["dpo", "kto", "pt", "grpo"])
def test_other_stages_are_refused(stage: str):
    with pytest.raises(ConfigError, match=f"stage='{stage}'.*ppo, sft, rm "):
        from_llamafactory({"stage": stage})


def test_a_misspelt_setting_is_left_with_the_closest_name():
    assert reasons(ppo_epoch=3)["ppo_epoch"].endswith(" ppo_epochs")


def test_tables_are_left_to_be_set_in_this_projects_columns():
    for stage, target in {"ppo": "prompts_path", "sft": "demonstrations_path", "rm": "preferences_path"}.items():
        conversion = from_llamafactory({"stage": stage, "dataset": "questions", "dataset_dir": "data"})
        assert f"set {target} to your data" in dict(conversion.not_carried)["dataset"]
        assert target in conversion.missing
        assert f"{target}: null # FILL IN: your " in texts_of([conversion])[1]


SFT = {
    **{"stage": "sft", "model_name_or_path": "org/base", "finetuning_type": "lora", "lora_rank": 8, "bf16": True},
    **{"learning_rate": 1e-4, "num_train_epochs": 2, "cutoff_len": 64, "warmup_ratio": 0.1, "logging_steps": 5},
    **{"lr_scheduler_type": "cosine", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
}


def test_stages_sft_and_rm_become_the_trainings_that_ppo_starts_from():
    sft, rm = from_llamafactory(SFT), from_llamafactory({**SFT, "stage": "rm", "max_steps": 40})
    common = {
        **{"learning_rate": 2e-5, "num_train_epochs": 2.0, "max_length": 64, "warmup_ratio": 0.1, "logging_steps": 5},
        **{"lr_scheduler_type": "cosine", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": True, "gradient_checkpointing": True, "device": "auto"},
        "group_by_length": False,
    }
    assert sft.parameters == {"supervised_finetuning": common, "base_model_path": "org/base"}
    assert rm.parameters == {"reward_modelling": {**common, "max_steps": 40}}
    assert set(dict(sft.not_carried)) == {"finetuning_type", "lora_rank", "learning_rate"}
    full = from_llamafactory({**SFT, "finetuning_type": "full"})
    assert full.parameters["supervised_finetuning"] == {**common, "learning_rate": 1e-4}
    assert set(dict(full.not_carried)) == {"lora_rank"}
    beside = from_llamafactory({**LORA, "max_steps": 5}, beside=("sft", "rm"))
    assert beside.globals == {"seed": 42}
    assert beside.missing == ["prompts_path"]
    assert {"model_name_or_path", "reward_model"} <= set(dict(beside.not_carried))
    parameters, globals_ = (yaml.safe_load(text) for text in texts_of([beside, sft, rm]))
    assert set(parameters) == {"ppo", "supervised_finetuning", "reward_modelling"}
    assert globals_ == {"seed": 42, "base_model_path": "org/base"} | dict.fromkeys(
        ("prompts_path", "demonstrations_path", "preferences_path")
    )


def test_what_stage_rm_has_of_its_own_does_not_reach_the_policy():
    given = {**SFT, "stage": "rm", "model_name_or_path": "org/other", "trust_remote_code": True}
    rm = from_llamafactory(given)
    assert rm.globals == {}
    left = dict(rm.not_carried)
    assert "org/other" in left["model_name_or_path"]
    assert "the policy's, too" in left["trust_remote_code"]
    assert any("longer pairs are left out" in remark for remark in rm.remarks)


def test_a_global_that_two_stages_set_to_two_values_is_refused():
    stages = [
        from_llamafactory({"stage": "ppo", "trust_remote_code": True}),
        from_llamafactory({"stage": "sft", "trust_remote_code": False}),
    ]
    with pytest.raises(ConfigError, match="trust_remote_code "):
        texts_of(stages)
