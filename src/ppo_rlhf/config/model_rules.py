"""Rules between the fields of PPOConfig that concern models; one line a problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig

LORA_FIELDS = ("lora_r", "lora_alpha", "lora_target_modules")
OFFLOADING_FIELDS = ("offload_reference_policy", "offload_reward_model")


def model_problems(c: PPOConfig) -> Iterator[str]:
    """Yield every broken rule."""
    if c.value_model == "shared":
        yield from _shared(c)
    elif c.export_value_head:
        yield (
            f"ppo.export_value_head=true and ppo.value_model={c.value_model} exclude each other: only the head of a "
            "shared trunk reads the policy's hidden states; set ppo.value_model=shared, or leave the first out"
        )
    yield from _lora(c)
    yield from _offloading(c)
    if c.device in ("cpu", "cuda"):
        yield from device_problems(c, c.device)


def _shared(c: PPOConfig) -> Iterator[str]:
    one = "policy and value head are one model with one optimiser"
    if c.value_learning_rate is not None:
        yield (
            f"ppo.value_model=shared and ppo.value_learning_rate={c.value_learning_rate:g} exclude each other: {one}; "
            "set the second to null; ppo.vf_coef weighs the value loss"
        )


def _lora(c: PPOConfig) -> Iterator[str]:
    if c.lora_dropout:
        yield (
            f"ppo.lora_dropout={c.lora_dropout:g} must be 0: with dropout the policy that is trained is not the one "
            "that sampled, and the first ratio is not 1; leave it out"
        )
    if not c.use_peft:
        for name in LORA_FIELDS:
            if name in c.not_default():
                yield (
                    f"ppo.{name}={getattr(c, name)} and ppo.use_peft=false exclude each other: there is no adapter; "
                    "set ppo.use_peft=true, or leave it out"
                )
    names = [name.strip() for name in c.lora_target_modules.split(",")]
    given = "give the names of linear layers, comma-separated, or all-linear, or all-linear+head"
    if not all(names):
        yield f"ppo.lora_target_modules={c.lora_target_modules!r} has an empty name: {given}"
    shorthands = [name for name in names if name.startswith("all-linear")]
    if shorthands and c.lora_target_modules not in ("all-linear", "all-linear+head"):
        yield f"ppo.lora_target_modules={c.lora_target_modules!r} has {shorthands[0]!r} among its names: {given}"


def _offloading(c: PPOConfig) -> Iterator[str]:
    if c.offload_reference_policy and c.use_peft:
        yield (
            "ppo.offload_reference_policy=true and ppo.use_peft=true exclude each other: the reference policy is the "
            "policy without its adapter and takes no memory of its own; leave the first out"
        )
    if c.offload_reward_model and c.use_peft and c.value_model == "reward_init":
        yield (
            "ppo.offload_reward_model=true, ppo.use_peft=true and ppo.value_model=reward_init exclude each other: the "
            "critic is an adapter on the reward model's weights, which therefore stay on the GPU; leave the first out"
        )


def device_problems(c: PPOConfig, device_type: str) -> Iterator[str]:
    """Yield one line for each setting that needs another type of device."""
    if device_type != "cpu":
        return
    for name in OFFLOADING_FIELDS:
        if getattr(c, name):
            yield (
                f"ppo.{name}=true has no meaning on the CPU (ppo.device={c.device}): all models are in the host's "
                "memory anyway; leave it out, or run on a GPU"
            )
    if c.dtype == "float16":
        yield (
            f"ppo.dtype=float16 needs a GPU (ppo.device={c.device}): a CPU has no loss scaling in accelerate; set "
            "float32, or bfloat16 on a processor with instructions for it"
        )
