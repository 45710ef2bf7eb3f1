"""Rules between the fields of PPOConfig that are about models: what excludes or needs what, one line a problem."""

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
    yield from _cuda_graphs(c)
    if c.side_by_side:
        yield from excludes_lanes(c)
    if c.device in ("cpu", "cuda"):
        yield from device_problems(c, c.device)


def _shared(c: PPOConfig) -> Iterator[str]:
    one = "policy and value head are one model with one optimiser"
    if c.value_learning_rate is not None:
        yield (
            f"ppo.value_model=shared and ppo.value_learning_rate={c.value_learning_rate:g} exclude each other: {one}; "
            "set the second to null; ppo.vf_coef weighs the value loss"
        )
    if c.align_overflow:
        yield (
            f"ppo.value_model=shared and ppo.align_overflow=true exclude each other: {one}, which always skip a step "
            "together; leave the second out"
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
                    f"ppo.{name}={getattr(c, name)} and ppo.use_peft=false exclude each other: there is no adapter "
                    "that it could shape; set ppo.use_peft=true, or leave it out"
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
            "policy's own frozen weights without the adapter, and takes no memory; leave the first out"
        )
    if c.offload_reward_model and c.use_peft and c.value_model == "reward_init":
        yield (
            "ppo.offload_reward_model=true, ppo.use_peft=true and ppo.value_model=reward_init exclude each other: the "
            "critic is an adapter on the reward model's own weights, which stay on the GPU with it; leave the first out"
        )


def _cuda_graphs(c: PPOConfig) -> Iterator[str]:
    if c.cuda_graphs and c.rollout_engine != "static":
        yield (
            f"ppo.cuda_graphs=true and ppo.rollout_engine={c.rollout_engine} exclude each other: only static decodes "
            "in steps that can be captured; set ppo.rollout_engine=static, or leave the first out"
        )


def excludes_lanes(c: PPOConfig) -> Iterator[str]:
    """Yield one line for each setting with which policy and critic cannot compute side by side."""
    if c.value_model == "shared":
        yield (
            "ppo.side_by_side=true and ppo.value_model=shared exclude each other: policy and critic are one model, "
            "whose passes are the same; leave the first out"
        )
    if c.target_kl is not None:
        yield (
            f"ppo.side_by_side=true and ppo.target_kl={c.target_kl:g} exclude each other: whether the critic takes its "
            "step depends on what the policy's passes find; leave one out"
        )
    if c.compile:
        yield (
            "ppo.side_by_side=true and ppo.compile=true exclude each other: layers are compiled within their first "
            "passes, one at a time; leave one out"
        )
    if c.gradient_checkpointing:
        yield (
            "ppo.side_by_side=true and ppo.gradient_checkpointing=true exclude each other: the one takes the memory "
            "that the other saves; leave one out"
        )


def device_problems(c: PPOConfig, device_type: str) -> Iterator[str]:
    """Yield one line for each setting that needs another type of device.

    A model would wait in the host's memory though the run computes there anyway, or there are no graphs to capture, or
    no threads to divide.
    """
    for name in OFFLOADING_FIELDS:
        if getattr(c, name) and device_type == "cpu":
            yield (
                f"ppo.{name}=true has no meaning on the CPU (ppo.device={c.device}): all models lie in the host's "
                "memory anyway; leave it out, or run on a GPU"
            )
    if c.side_by_side and device_type != "cpu":
        yield (
            f"ppo.side_by_side=true divides a CPU's threads, and the run computes on {device_type} (ppo.device="
            f"{c.device}): leave it out, or set ppo.device=cpu"
        )
    if c.cuda_graphs and device_type != "cuda":
        yield (
            f"ppo.cuda_graphs=true needs CUDA, and the run computes on {device_type} (ppo.device={c.device}): leave it "
            "out, or run on a GPU"
        )
