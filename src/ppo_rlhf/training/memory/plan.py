"""What a run needs: what it holds all the time, and what each phase of an iteration takes on top of that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from transformers import PretrainedConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError, PPORLHFError
from ppo_rlhf.models.products.packed_weights import packed_sizes
from ppo_rlhf.models.products.processors import lacks_fast_instructions, standing_in_for_a_gpu
from ppo_rlhf.models.quiet import critical_only
from ppo_rlhf.ppo.lanes import most_tokens_side_by_side
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.training.memory.live_bytes import Peak, counting, in_blocks
from ppo_rlhf.training.memory.simulation import Passes, SimulatedModels, larger

MEBIBYTE = 2**20
UPDATE = "update"

# What no shape tells, measured on a CPU. `python tests/benchmarks/memory.py --fit` measures the first four anew: they
# are fitted to the peaks of its settings (docs/memory.md has the table). They hold for glibc's heap, which keeps
# the blocks that a pass freed (`training.host_memory`); those of one kind of pass do not fit what another asks for.
LIBRARY_BYTES = 67 * MEBIBYTE  # code and workspaces that libraries load with the first passes
SIXTEEN_BIT_BYTES = 29 * MEBIBYTE  # as many more in 16 bits: code for shapes of products, or room to round in
UPDATE_IN_HEAP = 1.18  # bytes of the heap for each byte that the update has there in blocks that it frees
CRITIC_IN_HEAP = 0.14  # as many more where the critic has passes of its own behind them
PROCESS_BYTES = 534 * MEBIBYTE  # resident once `kedro run` has imported everything, measured apart


IN_HEAP = {
    "UPDATE_IN_HEAP": UPDATE_IN_HEAP,
    "CRITIC_IN_HEAP": CRITIC_IN_HEAP,
}


@dataclass(frozen=True)
class RunShape:
    """What a plan is made for, beside the settings of PPO.

    Attributes:
        policy: Configuration of the SFT model.
        prompt_length: Tokens of the longest prompt; batches are planned with prompts of that length alone.
        reward_model: Configuration of the reward model, None if no component of the reward is one.
        on_cpu: Whether the run computes on the CPU, in the memory of its process.
        evaluation_rows: Responses handled at a time by the evaluations while training; 0 without any.
    """

    policy: PretrainedConfig
    prompt_length: int
    reward_model: PretrainedConfig | None = None
    on_cpu: bool = True
    evaluation_rows: int = 0


@dataclass(frozen=True)
class Phase:
    """One phase of an iteration.

    Attributes:
        name: Of the phase.
        held: Bytes held through all of it.
        passing: Bytes at its peak on top of them.
        in_heap: How many of the latter are in blocks of the heap that are freed behind it.
    """

    name: str
    held: int
    passing: int
    in_heap: int

    @property
    def total(self) -> int:
        """Bytes of tensors at the phase's peak."""
        return self.held + self.passing


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run needs.

    Attributes:
        held: What is held all the time, by name: weights, and moments of the optimisers.
        phases: In the order of an iteration.
        on_host: Bytes of models that wait in the host's memory, beside what the device needs.
        on_cpu: Whether all this is memory of the process.
        critic_after_policy: Whether the critic has passes of its own, behind the policy's.
        sixteen_bits: Whether matrix products are of 16-bit numbers.
        not_counted: What a run takes on top of this.
    """

    held: dict[str, int]
    phases: tuple[Phase, ...]
    on_host: int
    on_cpu: bool
    critic_after_policy: bool
    sixteen_bits: bool = False
    not_counted: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def needed(self) -> int:
        """Bytes needed at the peak where the run computes, beyond what the process holds before it loads a model.

        On the CPU with what libraries load while they work, and with the blocks that the heap keeps of what the update
        frees. Blocks that are not of the heap are given back: of those the phase with the most counts alone.
        """
        if not self.on_cpu:
            return self.peak.total
        libraries = LIBRARY_BYTES + (SIXTEEN_BIT_BYTES if self.sixteen_bits else 0)
        return self.given_back + round(sum(each * self.kept[name] for name, each in IN_HEAP.items())) + libraries

    @property
    def given_back(self) -> int:
        """Bytes of the phase with the most, without those in blocks of the heap that are freed behind it."""
        return max(sum(self.held.values()), *(phase.total - phase.in_heap for phase in self.phases))

    @property
    def kept(self) -> dict[str, int]:
        """Bytes in blocks of the heap that the update frees, by the name of the constant that says what they cost."""
        update = self.phases[-1]
        return {
            "UPDATE_IN_HEAP": update.in_heap,
            "CRITIC_IN_HEAP": update.in_heap if self.critic_after_policy else 0,
        }


def plan_memory(config: PPOConfig, shape: RunShape) -> MemoryPlan:
    """Plan a run from configurations alone: no weights are read, and nothing is computed.

    Where policy and critic compute side by side in an iteration of few tokens alone (`training.lanes`), the plan is of
    that kind of update which needs more.

    Args:
        config: Hyperparameters.
        shape: Models, length of the prompts, device.

    Raises:
        ConfigError: Settings and models do not fit together.
        ModelError: An option does not fit the architecture, or torch cannot simulate it.
    """
    models = SimulatedModels.build(config, shape.policy, shape.reward_model)
    try:
        with critical_only("torch._subclasses.fake_tensor"):  # it logs what is raised, too
            return _planned(models, config, shape)
    except PPORLHFError:
        raise
    except Exception as error:  # whatever code of transformers or torch finds wrong with tensors that have no data
        what = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"plan-memory cannot simulate {type(models.policy).__name__}: {type(error).__name__}: {what}"
        ) from error


def _planned(models: SimulatedModels, config: PPOConfig, shape: RunShape) -> MemoryPlan:
    rows = min(config.local_rollout_forward_batch_size, config.local_batch_size)
    micro = micro_batch_rows(config, shape.prompt_length)
    micro_batches = math.ceil(config.local_mini_batch_size / micro)
    with counting() as live, nullcontext() if shape.on_cpu else standing_in_for_a_gpu():
        most_tokens = most_tokens_side_by_side(config, models.policy, on_cpu=shape.on_cpu)
        passes = Passes(models.to_fake(), config, live, shape.prompt_length)
        not_counted = tuple(_not_counted(config, models, passes))
        weights, (actor, critic) = models.weight_bytes(), models.trained()
        waiting = {
            "reference policy": config.offload_reference_policy,
            "reward model": config.offload_reward_model,
        }
        on_host = {name: weights.pop(name) for name, waits in waiting.items() if waits and name in weights}
        reference, scorer = (Peak(on_host.get(name, 0)) for name in waiting)  # on the device only while they score
        dtype = frozen_dtype(config)
        sixteen_bits = dtype.itemsize == 2
        packs_casts = sixteen_bits and not lacks_fast_instructions(dtype)  # autocast's copies, which the rollout counts
        packs = shape.on_cpu and config.rollout_engine == "static" and not packs_casts
        packed = in_blocks(packed_sizes(models.policy, dtype)) if packs else Peak()
        passing = {
            "rollout": passes.rollout(rows) + packed,
            "scoring by the reference policy": passes.reference_scoring(rows) + reference,
            "scoring by the policy": passes.policy_scoring(micro),
            "scoring by the reward model": passes.reward_scoring(rows) + scorer,
            "scoring by the critic": passes.critic_scoring(micro),
        }
        if shape.evaluation_rows:
            passing["evaluation"] = larger(
                passes.rollout(shape.evaluation_rows) + packed,
                passes.reference_scoring(shape.evaluation_rows) + reference,
            )
        row = shape.prompt_length + config.response_length  # tokens
        updates: dict[bool, Peak] = {}  # by whether policy and critic compute side by side
        if config.local_mini_batch_size * row > most_tokens:
            updates[False] = passes.update(micro, micro_batches, side_by_side=False)
        if most_tokens:
            fewer = max(1, int(min(micro, most_tokens // row)))
            updates[True] = passes.update(fewer, micro_batches, side_by_side=True)
    held = {f"{name}: weights": size for name, size in weights.items()}
    if config.ema_decay is not None:
        held["policy: moving average"] = actor.total
    held["optimisers: two moments of each weight that trains"] = 2 * (actor.total + critic.total)

    def plan(update: Peak, two_lanes: bool) -> MemoryPlan:
        peaks = {**passing, UPDATE: update}  # gradients included: behind the update none is held
        phases = [Phase(name, sum(held.values()), p.total, p.in_heap) for name, p in peaks.items() if p.total]
        critic_after_policy = config.value_model != "shared" and not two_lanes
        return MemoryPlan(
            held, tuple(phases), sum(on_host.values()), shape.on_cpu, critic_after_policy, sixteen_bits, not_counted
        )

    plans = [plan(update, two_lanes) for two_lanes, update in updates.items()]
    return max(plans, key=lambda each: each.needed)


def _not_counted(config: PPOConfig, models: SimulatedModels, passes: Passes) -> Iterator[str]:
    if config.cuda_graphs:
        yield "keys and values of a rollout and 16-bit weights, which ppo.cuda_graphs holds all the time"
    if not passes.are_without_padding():
        yield f"padding, masks and transformers' cache, which {type(models.policy).__name__} cannot do without"
    elif config.rollout_engine != "static":
        yield f"padding and transformers' cache, with which ppo.rollout_engine={config.rollout_engine} decodes"


def micro_batch_rows(config: PPOConfig, prompt_length: int) -> int:
    """Return the responses of one forward and backward pass if all have full length."""
    rows = config.local_micro_batch_size
    if config.max_tokens_per_micro_batch is None:
        return rows
    return max(1, min(rows, config.max_tokens_per_micro_batch // (prompt_length + config.response_length)))
