"""What to change first where a run needs more memory than there is: the cheapest that helps, time and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.training.memory.plan import UPDATE, MemoryPlan, RunShape, plan_memory

Changes = dict[str, Any]
WORTH_NAMING = 0.98  # of what was needed before


@dataclass(frozen=True)
class Remedy:
    """A change of settings, on top of those before it.

    Attributes:
        changes: The settings, as `ppo.name=value`.
        price: What it costs.
        needed: Bytes that the run needs with it.
    """

    changes: str
    price: str
    needed: int


def remedies(config: PPOConfig, shape: RunShape, plan: MemoryPlan, limit: int) -> list[Remedy]:
    """Return changes, each on top of those before it, until the run fits into `limit` bytes or none is left.

    Each is the cheapest that lowers the peak as it then is: those that keep the numbers of the run come before another
    precision, and that before another way to train. What the settings do not allow is left out.

    Args:
        config: Hyperparameters.
        shape: What the plan was made for.
        plan: Of these two.
        limit: Bytes that there are.
    """
    found: list[Remedy] = []
    while plan.needed > limit:
        step = _next_step(config, shape, plan)
        if step is None:
            break
        changes, price, config, plan = step
        found.append(Remedy(_in_words(changes), price, plan.needed))
    return found


def _next_step(
    config: PPOConfig, shape: RunShape, plan: MemoryPlan
) -> tuple[Changes, str, PPOConfig, MemoryPlan] | None:
    """Return the first change that lowers the peak, its price, and settings and plan with it."""
    for price, changes_of in _STEPS:
        changes = changes_of(config, shape, plan.peak.name == UPDATE)
        if changes is None:
            continue
        try:
            trial = replace(config, **changes)
        except ConfigError:  # excluded by another setting of this person's
            continue
        lower = plan_memory(trial, shape)
        if lower.needed <= WORTH_NAMING * plan.needed:
            return changes, price, trial, lower
    return None


def _smaller_rollouts(c: PPOConfig, _: RunShape, in_update: bool) -> Changes | None:
    if in_update:
        return None
    rows = min(c.local_rollout_forward_batch_size, c.local_batch_size)
    return {"local_rollout_forward_batch_size": rows // 2} if rows > 1 else None


def _one_at_a_time(c: PPOConfig, shape: RunShape, in_update: bool) -> Changes | None:
    return {"side_by_side": False} if in_update and shape.on_cpu and c.side_by_side is not False else None


def _smaller_micro_batches(c: PPOConfig, _: RunShape, __: bool) -> Changes | None:
    """The same batch and minibatches in smaller pieces."""
    rows = c.per_device_train_batch_size
    if rows % 2:
        return None
    while rows % 2 == 0 and rows >= c.local_micro_batch_size:  # a piece is never larger than a minibatch
        rows //= 2
    pieces = c.local_batch_size // rows
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": pieces}


def _checkpointing(c: PPOConfig, _: RunShape, in_update: bool) -> Changes | None:
    return None if c.gradient_checkpointing or not in_update else {"gradient_checkpointing": True}


def _offloaded_reference(c: PPOConfig, shape: RunShape, _: bool) -> Changes | None:
    return None if shape.on_cpu or c.offload_reference_policy else {"offload_reference_policy": True}


def _offloaded_reward_model(c: PPOConfig, shape: RunShape, _: bool) -> Changes | None:
    absent = shape.on_cpu or shape.reward_model is None
    return None if absent or c.offload_reward_model else {"offload_reward_model": True}


def _sixteen_bits(c: PPOConfig, _: RunShape, __: bool) -> Changes | None:
    return {"dtype": "bfloat16"} if c.dtype in ("float32", "float64") else None


def _shared_trunk(c: PPOConfig, _: RunShape, __: bool) -> Changes | None:
    if c.value_model == "shared":
        return None
    return {"value_model": "shared", **({} if c.value_learning_rate is None else {"value_learning_rate": None})}


def _adapters(c: PPOConfig, _: RunShape, __: bool) -> Changes | None:
    if c.use_peft:
        return None
    return {"use_peft": True, **({"offload_reference_policy": False} if c.offload_reference_policy else {})}


_STEPS: tuple[tuple[str, Callable[[PPOConfig, RunShape, bool], Changes | None]], ...] = (
    ("the same numbers but for rounding, slower rollouts", _smaller_rollouts),
    ("the same numbers but for rounding, policy and critic one after the other", _one_at_a_time),
    ("the same batch in smaller pieces: the same numbers but for rounding", _smaller_micro_batches),
    ("the same numbers, an update that takes about a third longer", _checkpointing),
    ("the same numbers, a copy to the GPU each iteration", _offloaded_reference),
    ("the same numbers, a copy to the GPU each iteration", _offloaded_reward_model),
    ("frozen models and activations in 16 bits", _sixteen_bits),
    ("another critic: a value head on the policy", _shared_trunk),
    ("adapters train instead of all weights, at higher learning rates", _adapters),
)


def _in_words(changes: Changes) -> str:
    words = {None: "null", True: "true", False: "false"}
    return ", ".join(
        f"ppo.{name}={words[value] if value is None or isinstance(value, bool) else value}"
        for name, value in changes.items()
    )
