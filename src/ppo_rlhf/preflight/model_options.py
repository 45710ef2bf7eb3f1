"""Settings of PPO that ask something of the model: adapters, checkpointed gradients, layers, a value head that fits."""

from __future__ import annotations

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.adapters import check_critic_targets, check_targets
from ppo_rlhf.models.compilation import layers_of as check_layers
from ppo_rlhf.models.critic import make_value_head
from ppo_rlhf.models.forward import backbone_of
from ppo_rlhf.models.gradient_checkpointing import check_gradient_checkpointing
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.build import lora_settings
from ppo_rlhf.preflight.request import RunRequest


def check_model_options(run: RunRequest, models: dict[str, PretrainedHandle]) -> None:
    """Note settings that the model's architecture cannot serve; of the weights nothing is read but a value head.

    A run that trains the SFT policy itself is checked with the model that it starts from, if there is one.
    """
    ppo, handle = run.group("ppo"), models.get("sft_policy") or models.get("base_model")
    if not isinstance(ppo, PPOConfig) or handle is None:
        return
    with run.noting():
        head = handle.value_head() if ppo.value_model != "reward_init" and "sft_policy" in models else None
        if not (ppo.use_peft or ppo.gradient_checkpointing or ppo.compile or head is not None):
            return
        empty = handle.empty_causal_lm()
        if ppo.gradient_checkpointing:
            check_gradient_checkpointing(empty)
        if ppo.compile:
            check_layers(backbone_of(empty))
        if ppo.use_peft:
            check_targets(empty, lora_settings(ppo))
            if ppo.value_model == "separate":
                check_critic_targets(backbone_of(empty), lora_settings(ppo))
        if head is not None:
            make_value_head(empty, head.to("meta"))
