"""Settings about models that exclude each other, or need one another, are refused together and by name."""

import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

ONE = "policy and value head are one model with one optimiser"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"value_model": "shared", "value_learning_rate": 1e-5},
            f"ppo.value_model=shared and ppo.value_learning_rate=1e-05 exclude each other: {ONE}; set the second "
            "to null; ppo.vf_coef weighs the value loss",
        ),
        (
            {"value_model": "shared", "align_overflow": True},
            f"ppo.value_model=shared and ppo.align_overflow=true exclude each other: {ONE}, which always skip a step "
            "together; leave the second out",
        ),
        (
            {"cuda_graphs": True, "rollout_engine": "hf"},
            "ppo.cuda_graphs=true and ppo.rollout_engine=hf exclude each other: only static decodes in steps that can "
            "be captured; set ppo.rollout_engine=static, or leave the first out",
        ),
        (
            {"cuda_graphs": True, "device": "cpu"},
            "ppo.cuda_graphs=true needs CUDA, and the run computes on cpu (ppo.device=cpu): leave it out, or run on a "
            "GPU",
        ),
        (
            {"export_value_head": True},
            "ppo.export_value_head=true and ppo.value_model=separate exclude each other: only the head of a shared "
            "trunk reads the policy's hidden states; set ppo.value_model=shared, or leave the first out",
        ),
        (
            {"use_peft": True, "lora_dropout": 0.05},
            "ppo.lora_dropout=0.05 must be 0: with dropout the policy that is trained is not the one that sampled, and "
            "the first ratio is not 1; leave it out",
        ),
        (
            {"lora_r": 8},
            "ppo.lora_r=8 and ppo.use_peft=false exclude each other: there is no adapter that it could shape; set "
            "ppo.use_peft=true, or leave it out",
        ),
        (
            {"lora_target_modules": "q_proj"},
            "ppo.lora_target_modules=q_proj and ppo.use_peft=false exclude each other: there is no adapter that it "
            "could shape; set ppo.use_peft=true, or leave it out",
        ),
        (
            {"use_peft": True, "lora_target_modules": "q_proj,,v_proj"},
            "ppo.lora_target_modules='q_proj,,v_proj' has an empty name: give the names of linear layers, "
            "comma-separated, or all-linear, or all-linear+head",
        ),
        (
            {"use_peft": True, "lora_target_modules": "all-linear,lm_head"},
            "ppo.lora_target_modules='all-linear,lm_head' has 'all-linear' among its names: give the names of linear "
            "layers, comma-separated, or all-linear, or all-linear+head",
        ),
        (
            {"use_peft": True, "lora_target_modules": "all-linear+haed"},
            "ppo.lora_target_modules='all-linear+haed' has 'all-linear+haed' among its names: give the names of linear "
            "layers, comma-separated, or all-linear, or all-linear+head",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"value_model": "shared", "vf_coef": 0.5, "export_value_head": True},
        {"value_model": "shared", "use_peft": True, "lora_r": 4, "lora_alpha": 8},
        {"value_model": "reward_init", "use_peft": True, "lora_target_modules": "q_proj, v_proj"},
        {"gradient_checkpointing": True, "ema_decay": 0.99},
    ],
)
def test_settings_that_go_together_are_taken(settings):
    assert PPOConfig(**settings).not_default() == settings


@pytest.mark.parametrize("settings", [{"ema_decay": 1.0}, {"ema_decay": 0.0}, {"lora_r": 0}, {"value_model": "none"}])
def test_values_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PPOConfig(**settings)


def test_the_weight_of_the_value_loss_is_advised_against_only_where_it_does_nothing():
    assert any("ppo.vf_coef=0.5" in line for line in PPOConfig(vf_coef=0.5).advice())
    assert not any("ppo.vf_coef" in line for line in PPOConfig(vf_coef=0.5, value_model="shared").advice())
