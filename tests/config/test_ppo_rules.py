"""Rules between settings: a broken one is refused in one line that names it, and its neighbour is accepted."""

import re

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo_rules import _rules
from ppo_rlhf.core.errors import ConfigError

ADAPTIVE = {"kl_controller": "adaptive"}
POLYNOMIAL = {"lr_scheduler_type": "polynomial"}
VLLM = {"rollout_engine": "vllm"}
SERVER = {**VLLM, "vllm_mode": "server"}
LORA = {"use_peft": True}
BROKEN_AND_KEPT = [
    ({"num_mini_batches": 3}, {"num_mini_batches": 4}),
    ({"responses_per_prompt": 3}, {"responses_per_prompt": 4}),
    (
        {"reward_normalisation": "batch", "per_device_train_batch_size": 1},
        {"reward_normalisation": "running", "per_device_train_batch_size": 1},
    ),
    ({"stop_token_id": 3, "stop_token": "period"}, {"stop_token_id": 3}),
    ({"min_response_length": 54}, {"min_response_length": 53}),
    ({"min_response_length": 2, "stop_token": "none"}, {"min_response_length": 2, "stop_token": "period"}),
    ({"missing_eos_penalty": 1.0, "stop_token": "none"}, {"missing_eos_penalty": 1.0, "stop_token": "period"}),
    ({"truncated_responses": "penalise"}, {"truncated_responses": "penalise", "missing_eos_penalty": 0.0}),
    ({"truncated_responses": "replace"}, {"truncated_responses": "replace", "missing_eos_penalty": 1.0}),
    ({"truncated_responses": "mask", "missing_eos_penalty": 1.0}, {"truncated_responses": "mask"}),
    ({"truncated_responses": "bootstrap", "missing_eos_penalty": 1.0}, {"truncated_responses": "bootstrap"}),
    (
        {"truncated_responses": "mask", "stop_token": "none"},
        {"truncated_responses": "mask", "stop_token": "period"},
    ),
    (
        {"truncated_responses": "bootstrap", "overlong_buffer": 8},
        {"truncated_responses": "keep", "overlong_buffer": 8},
    ),
    ({"overlong_buffer": 54}, {"overlong_buffer": 53}),
    ({"overlong_buffer": 8, "stop_token": "none"}, {"overlong_buffer": 8, "stop_token": "period"}),
    ({"vllm_mode": "server"}, {"vllm_mode": "server", "vllm_server_base_url": "http://a:1", **VLLM}),
    ({"vllm_mode": "server", **VLLM}, {"vllm_mode": "colocate", **VLLM}),
    ({"vllm_server_base_url": "http://a:1", **VLLM}, {"vllm_server_base_url": "http://a:1", **SERVER}),
    (
        {"vllm_server_timeout": 9.0, **VLLM},
        {"vllm_server_timeout": 9.0, "vllm_server_base_url": "http://a:1", **SERVER},
    ),
    ({"vllm_max_model_length": 9}, {"vllm_max_model_length": 9, **VLLM}),
    *(
        ({name: value, **SERVER, "vllm_server_base_url": "http://a:1"}, {name: value, **VLLM})
        for name, value in {
            "vllm_gpu_memory_utilization": 0.5,
            "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": 9,
        }.items()
    ),
    ({"vllm_tensor_parallel_size": 2, **VLLM}, {"vllm_tensor_parallel_size": 1, **VLLM}),
    ({"environment": "a:b", "turn_length": 4, **VLLM}, {"environment": "a:b", "turn_length": 4}),
    ({"deterministic": True, **VLLM}, {"deterministic": True}),
    ({"top_k": 5, **VLLM}, {"top_k": 5}),
    ({"top_p": 0.9, **VLLM}, {"top_p": 1.0, **VLLM}),
    ({"min_response_length": 2, **VLLM}, {"min_response_length": 2}),
    ({"rollout_engine": "vllm", "dtype": "float64"}, {"rollout_engine": "vllm", "dtype": "bfloat16"}),
    ({"kl_in": "loss"}, {"kl_in": "loss", "kl_estimator": "k2"}),
    ({"kl_in": "reward", "kl_estimator": "k3+"}, {"kl_in": "loss", "kl_estimator": "k3+"}),
    (
        {"offload_reference_policy": True, "kl_in": "loss", "kl_estimator": "full"},
        {"offload_reference_policy": True, "kl_in": "reward", "kl_estimator": "full"},
    ),
    ({"kl_warning": 21.0}, {"kl_warning": 20.0}),
    ({"kl_coef": 0, **ADAPTIVE}, {"kl_coef": 0, "kl_controller": "fixed"}),
    ({"kl_target": 3.0}, {"kl_target": 3.0, **ADAPTIVE}),
    ({"kl_horizon": 200.0}, {"kl_horizon": 200.0, **ADAPTIVE}),
    ({"lam": 0.9, "lam_alpha": 0.05, "lam_critic": 1.0}, {"lam": 0.9, "lam_alpha": 0.05}),
    ({"positive_coef": 0.1}, {"positive_coef": 0.1, "positive_threshold": 0.0}),
    ({"positive_threshold": 1.0}, {"positive_threshold": 1.0, "positive_coef": 0.1}),
    ({"importance_low": 0.7}, {"importance_low": 0.7, "importance_high": 6.0}),
    ({"importance_high": 6.0}, {"importance_low": 0.7, "importance_high": 6.0}),
    *(
        ({name: value, "importance_low": 0.7, "importance_high": 6.0}, {name: value})
        for name, value in {"cliprange": 0.3, "cliprange_high": 0.28, "dual_clip": 3.0, "importance_cap": 2.0}.items()
    ),
    ({"value_freeze": "attention", "value_model": "shared"}, {"value_freeze": "attention"}),
    ({"value_freeze": "attention", **LORA}, {"value_freeze": "none", **LORA}),
    ({"num_critic_epochs": 3}, {"num_critic_epochs": 3, "num_ppo_epochs": 2}),
    ({"value_model": "shared", "num_critic_epochs": 8}, {"value_model": "reward_init", "num_critic_epochs": 8}),
    ({"drop_uniform_prompts": 2}, {"drop_uniform_prompts": 2, "responses_per_prompt": 2}),
    ({"critic_warmup_iterations": 1250}, {"critic_warmup_iterations": 1249}),
    ({"learning_rate": 1e-7, **POLYNOMIAL}, {"learning_rate": 2e-7, **POLYNOMIAL}),
    ({"value_learning_rate": 1e-8, **POLYNOMIAL}, {"value_learning_rate": 1e-8}),
    ({"export_value_head": True}, {"export_value_head": True, "value_model": "shared"}),
    ({"lora_r": 8}, {"lora_r": 8, **LORA}),
    ({"export": "adapter"}, {"export": "adapter", **LORA}),
    (
        {"export": "adapter", **LORA, "value_model": "shared", "export_value_head": True},
        {"export": "merged", **LORA, "value_model": "shared", "export_value_head": True},
    ),
    ({"export": "adapter", **LORA, "load_in_4bit": True}, {"export": "merged", **LORA, "load_in_4bit": True}),
    ({"lora_target_modules": "q_proj,,v_proj", **LORA}, {"lora_target_modules": "q_proj, v_proj", **LORA}),
    ({"lora_target_modules": "all-linear,lm_head", **LORA}, {"lora_target_modules": "all-linear+head", **LORA}),
    ({"load_in_4bit": True}, {"load_in_4bit": True, **LORA}),
    ({"load_in_4bit": True, **LORA, "dtype": "float64"}, {"load_in_4bit": True, **LORA, "dtype": "bfloat16"}),
    ({"optim": "adamw_8bit", "dtype": "float64"}, {"optim": "adamw_torch_fused", "dtype": "float64"}),
    ({"offload_reference_policy": True, **LORA}, {"offload_reference_policy": True}),
    (
        {"offload_reward_model": True, **LORA, "value_model": "reward_init"},
        {"offload_reward_model": True, "value_model": "reward_init"},
    ),
    ({"offload_reward_model": True, "device": "cpu"}, {"offload_reward_model": True, "device": "cuda"}),
    ({"dtype": "float16", "device": "cpu"}, {"dtype": "float16", "device": "cuda"}),
]


@pytest.mark.parametrize(
    ("broken", "kept"), BROKEN_AND_KEPT, ids=lambda settings: "-".join(map(str, settings.items())).replace("'", "")
)
def test_settings_that_do_not_go_together_are_refused_in_one_line_by_name(broken, kept):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**broken)
    (line,) = str(caught.value).splitlines()
    assert f"ppo.{next(iter(broken))}" in line
    PPOConfig(**kept)


def test_sizes_that_a_batch_could_have_are_given():
    with pytest.raises(ConfigError, match="15, 18"):
        PPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, num_mini_batches=3)


def test_all_broken_rules_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        PPOConfig(kl_in="loss", overlong_buffer=60, responses_per_prompt=3, critic_warmup_iterations=2000)
    assert len(str(caught.value).splitlines()) == 4


def test_no_rule_calls_a_setting_the_first_or_the_second():
    for rule in _rules(PPOConfig):
        line = f"{rule.seen(PPOConfig())}: {rule.meaning}"
        assert not re.search(r"\b(the first|the second|the other)\b", line), rule.reads
