"""How much memory one process of a run needs, by formula, before any weight is read (docs/memory.md).

Models are made on the device `meta`, where parameters have shapes and no data, so weights, gradients and moments are
counted exactly. Activations are estimated: each linear layer keeps its input and output for the backward pass. For a
block of GPT that makes 16 h numbers a token, the 32 s b h bytes of Korthikanti et al. 2022 (arXiv:2205.05198) without
dropout and without the attention matrix, which SDPA does not keep; `KEPT` adds what other layers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.quiet import quiet_transformers
from ppo_rlhf.ppo.accelerator import frozen_dtype, trained_dtype
from ppo_rlhf.ppo.build import build_critic, policy_to_train
from ppo_rlhf.ppo.logprobs import LOGITS_HELD

PROCESS_BYTES = 600 * 2**20
"""Resident once `kedro run` has imported its libraries and they have computed something (measured on Linux)."""
UPDATE = "update"
KEPT = 1.5
"""Peak of the activations over the inputs and outputs of linear layers: norms and position embeddings keep the rest
(Llama: 1.13 in float32, 1.54 in bfloat16), and the backward pass holds gradients of activations."""


@dataclass(frozen=True)
class RunShape:
    """What a plan is made for, beside the settings of PPO.

    Attributes:
        policy: Configuration of the SFT model.
        prompt_length: Tokens of the longest prompt.
        reward_model: Configuration of the reward model; None if no component of the reward is one.
        on_cpu: Whether the run computes on the CPU, in the host's memory.
        evaluation_rows: Responses at a time in the evaluations during training; 0 without any.
        processes: Processes of the run; all numbers are those of one process.
        trust_remote_code: Whether Python code in the models' directories may run.
    """

    policy: PretrainedConfig
    prompt_length: int
    reward_model: PretrainedConfig | None = None
    on_cpu: bool = True
    evaluation_rows: int = 0
    processes: int = 1
    trust_remote_code: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one process needs.

    Attributes:
        held: Bytes held all the time, by name: weights, moments, and the moving average.
        phases: Bytes at the peak of each phase, `held` included, in the order of an iteration.
        on_host: Bytes of offloaded models, in the host's memory.
    """

    held: dict[str, int]
    phases: dict[str, int]
    on_host: int

    @property
    def peak(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def needed(self) -> int:
        """Bytes at the peak."""
        return self.phases[self.peak]


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a run's models.

    Attributes:
        weights: Bytes of weights and buffers, by model.
        trained: Bytes of the trained weights of policy and critic.
        copied: Bytes of the 16-bit copies that autocast makes of a model's float32 weights.
        kept_per_token: Numbers that all layers keep of a token for the backward pass.
    """

    weights: dict[str, int]
    trained: tuple[int, int]
    copied: int
    kept_per_token: int


def plan_memory(config: PPOConfig, shape: RunShape) -> MemoryPlan:
    """Return what a run needs in each phase, with prompts of the longest length and responses of full length.

    Args:
        config: Hyperparameters.
        shape: Models, lengths and device.

    Raises:
        ConfigError: The critic is to start as a reward model, and there is none.
        ModelError: An option does not fit the architecture.
    """
    return _plan(config, shape, _sizes(config, shape))


def _plan(config: PPOConfig, shape: RunShape, sizes: _Sizes) -> MemoryPlan:
    waiting = {"reference policy": config.offload_reference_policy, "reward model": config.offload_reward_model}
    offloaded = {name: size for name, size in sizes.weights.items() if waiting.get(name)}
    held = {f"{name}: weights": size for name, size in sizes.weights.items() if name not in offloaded}
    held["optimisers: two moments of each trained weight"] = 2 * sum(sizes.trained)
    if config.ema_decay is not None:
        held["policy: moving average"] = sizes.trained[0]

    passes = _Passes(config, shape, sizes)
    rows = min(config.local_rollout_forward_batch_size, config.local_batch_size)
    micro = micro_batch_rows(config, shape.prompt_length)
    reference = offloaded.get("reference policy", 0)
    passing = {
        "rollout": passes.rollout(rows),
        "scoring by the reference policy": passes.scoring(rows) + reference,
        "scoring by policy and critic": passes.scoring(micro) + sizes.copied,
        "scoring by the reward model": passes.scoring(rows, logits=False) + offloaded.get("reward model", 0),
        "evaluation": max(passes.rollout(shape.evaluation_rows), passes.scoring(shape.evaluation_rows) + reference),
        UPDATE: passes.update(micro),
    }
    if shape.reward_model is None:
        del passing["scoring by the reward model"]
    if not shape.evaluation_rows:
        del passing["evaluation"]
    phases = {name: sum(held.values()) + size for name, size in passing.items()}
    return MemoryPlan(held, phases, sum(offloaded.values()))


def micro_batch_rows(config: PPOConfig, prompt_length: int) -> int:
    """Return the responses of one forward and backward pass if all have full length."""
    rows = config.local_micro_batch_size
    if config.max_tokens_per_micro_batch is None:
        return rows
    return max(1, min(rows, config.max_tokens_per_micro_batch // (prompt_length + config.response_length)))


class _Passes:
    """Bytes of the forward and backward passes, beyond weights and moments."""

    def __init__(self, config: PPOConfig, shape: RunShape, sizes: _Sizes) -> None:
        text = shape.policy.get_text_config()
        heads = text.num_attention_heads
        key_value_heads = getattr(text, "num_key_value_heads", None) or heads
        head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
        self.config, self.shape, self.sizes = config, shape, sizes
        self.bytes = frozen_dtype(config).itemsize
        self.row = shape.prompt_length + config.response_length
        self.vocabulary = text.vocab_size
        self.cache_per_token = 2 * text.num_hidden_layers * key_value_heads * head_width * self.bytes
        self.layer_inputs = text.num_hidden_layers * text.hidden_size * self.bytes
        self.kept = round(KEPT * sizes.kept_per_token) * self.bytes
        self.one_layer = self.kept // text.num_hidden_layers

    def rollout(self, rows: int) -> int:
        """Return the key-value cache at full length, and the larger of the prefill and one step's logits."""
        logits = rows * self.vocabulary * (self.bytes + 3 * 4)  # logits, and their probabilities in float32
        prefill = rows * self.shape.prompt_length * self.one_layer
        return rows * self.row * self.cache_per_token + max(logits, prefill) + self.sizes.copied

    def scoring(self, rows: int, *, logits: bool = True) -> int:
        """Return a forward pass without gradients: one layer at a time, then a chunk of logits."""
        return max(rows * self.row * self.one_layer, self._logits(rows) if logits else 0)

    def update(self, rows: int) -> int:
        """Return the gradients of policy and critic, and one micro-batch: activations, and logits with gradients."""
        gradients = sum(self.sizes.trained) * (1 if self.shape.processes == 1 else 2)  # the second: DDP's buckets
        kept = self.layer_inputs + self.one_layer if self.config.gradient_checkpointing else self.kept
        logits = self._logits(rows) * (3 if self.config.entropy_coef else 2)
        return gradients + rows * self.row * kept + logits + self.sizes.copied

    def _logits(self, rows: int) -> int:
        held = LOGITS_HELD * (1 if self.shape.on_cpu else 16)
        return min(rows * self.config.response_length * self.vocabulary, held) * self.bytes


def _sizes(config: PPOConfig, shape: RunShape) -> _Sizes:
    """Make the models with the functions of a run, on the device `meta`, and count."""
    trusted = {"trust_remote_code": shape.trust_remote_code}
    frozen = frozen_dtype(config)
    with torch.device("meta"), quiet_transformers():
        reference = AutoModelForCausalLM.from_config(shape.policy, dtype=frozen, **trusted).requires_grad_(False)
        linear = [module for module in reference.base_model.modules() if isinstance(module, nn.Linear | Conv1D)]
        kept_per_token = sum(sum(module.weight.shape) for module in linear)
        base = reference
        if not config.use_peft:
            base = AutoModelForCausalLM.from_config(shape.policy, dtype=trained_dtype(config), **trusted)
        policy = policy_to_train(base, config)
        reward_model = None
        if shape.reward_model is not None:
            reward_model = AutoModelForSequenceClassification.from_config(shape.reward_model, dtype=frozen, **trusted)
        critic = build_critic(config, policy, reward_model)
    known: set[int] = set()
    weights = {}
    models = {"policy": policy, "reference policy": reference, "reward model": reward_model, "critic": critic}
    for name, model in models.items():
        if model is not None:
            new = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers()) if id(t) not in known}
            known.update(new)  # models that share weights count them once
            weights[name] = sum(new.values())
    trained = tuple(sum(p.nbytes for p in model.parameters() if p.requires_grad) for model in (policy, critic))
    is_cast = frozen.itemsize == 2 and not config.use_peft  # under LoRA the weights have 16 bits
    copied = 2 * sum(p.numel() for p in policy.parameters()) if is_cast else 0
    return _Sizes(weights, (trained[0], trained[1]), copied, kept_per_token)


# What to change first.

Changes = dict[str, Any]
WORTH_NAMING = 0.98
"""A change is named if it leaves at most this share of the peak."""


@dataclass(frozen=True)
class Suggestion:
    """A change of settings, on top of the suggestions before it.

    Attributes:
        changes: Settings of PPOConfig and their new values.
        price: What it costs.
        needed: Bytes that one process needs with it.
    """

    changes: Changes
    price: str
    needed: int

    def __str__(self) -> str:
        """Write the settings as `ppo.name=value`."""
        words = {None: "null", True: "true", False: "false"}
        return ", ".join(
            f"ppo.{name}={words[value] if value is None or isinstance(value, bool) else value}"
            for name, value in self.changes.items()
        )


def suggestions(config: PPOConfig, shape: RunShape, limit: int) -> Iterator[Suggestion]:
    """Yield changes of settings, each on top of the others, until the run fits into `limit` bytes or none helps.

    Each is the cheapest that lowers the peak as it then is. Changes that the other settings exclude are left out.
    """
    known: dict[tuple[object, ...], _Sizes] = {}

    def plan_of(c: PPOConfig) -> MemoryPlan:
        models = (c.dtype, c.use_peft, c.value_model)  # the settings of _STEPS that change the models
        if models not in known:
            known[models] = _sizes(c, shape)
        return _plan(c, shape, known[models])

    needed = plan_of(config).needed
    while needed > limit:
        for price, changes_of in _STEPS:
            changes = changes_of(config, shape)
            try:
                changed = replace(config, **changes)
            except ConfigError:
                continue
            lower = plan_of(changed).needed
            if lower <= WORTH_NAMING * needed:
                config, needed = changed, lower
                yield Suggestion(changes, price, needed)
                break
        else:
            return


def _smaller_rollouts(c: PPOConfig, _: RunShape) -> Changes:
    return {
        "local_rollout_forward_batch_size": max(1, min(c.local_rollout_forward_batch_size, c.local_batch_size) // 2)
    }


def _smaller_micro_batches(c: PPOConfig, _: RunShape) -> Changes:
    """Cut the same batch into pieces of half the size; a piece is never larger than a minibatch."""
    rows = c.per_device_train_batch_size
    if rows % 2:
        return {}
    while rows % 2 == 0 and rows >= c.local_micro_batch_size:
        rows //= 2
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": c.local_batch_size // rows}


def _sixteen_bits(c: PPOConfig, _: RunShape) -> Changes:
    return {} if c.dtype == "float16" else {"dtype": "bfloat16"}


_STEPS: tuple[tuple[str, Callable[[PPOConfig, RunShape], Changes]], ...] = (
    ("the same numbers but for rounding, slower rollouts", _smaller_rollouts),
    ("the same batch in smaller pieces: the same numbers but for rounding", _smaller_micro_batches),
    ("the same numbers, an update takes about a third longer", lambda c, s: {"gradient_checkpointing": True}),
    (
        "the same numbers, a copy to the GPU each iteration",
        lambda c, s: {} if s.on_cpu or c.use_peft else {"offload_reference_policy": True},
    ),
    (
        "the same numbers, a copy to the GPU each iteration",
        lambda c, s: {} if s.on_cpu or s.reward_model is None else {"offload_reward_model": True},
    ),
    ("frozen models and activations in 16 bits", _sixteen_bits),
    ("another critic: a value head on the policy", lambda c, s: {"value_model": "shared", "value_learning_rate": None}),
    (
        "adapters train instead of all weights, at higher learning rates",
        lambda c, s: {"use_peft": True, "offload_reference_policy": False},
    ),
)
"""Price and change, the cheapest first."""


# What there is.


def available_memory(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the free bytes on a device and on the host; a container's limit counts. On the CPU both are the host's."""
    host = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        host = min(host, max(0, limit - used))
    except (OSError, ValueError):  # no control group, or no limit (`max`)
        pass
    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host), host
