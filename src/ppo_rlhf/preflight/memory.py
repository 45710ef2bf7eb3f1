"""Computes how much memory one process of a run needs, before any weight is read (docs/memory.md).

Models are created on the device `meta`, where parameters have shapes but no data. Therefore the computed bytes of
weights, gradients and optimiser moments are exact. Activations are estimated: each linear layer keeps its input and its
output for the backward pass. For a GPT block of width h the inputs and outputs of all linear layers are 16 h numbers
per token. In 16 bits, 16 h numbers are the 32 s b h bytes of Korthikanti et al. 2022 (arXiv:2205.05198) without dropout
and without the attention matrix, which SDPA does not keep. `KEPT` of `ppo_rlhf.passes.free_memory` adds the activations
that other layers keep.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.advice import head_rate
from ppo_rlhf.config.ppo import OFFLOADING_FIELDS
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.logprobs import UNKNOWN_CARD
from ppo_rlhf.models.quantisation import four_bit_bytes
from ppo_rlhf.models.reward_model import CausalLMRewardConfig, CausalLMRewardModel
from ppo_rlhf.models.stored_weights import cast_linear_weights
from ppo_rlhf.passes.forward import has_plain_attention
from ppo_rlhf.passes.free_memory import (
    decoding_bytes,
    in_equal_parts,
    layer_bytes,
    scored_at_a_time,
)
from ppo_rlhf.passes.prefixes import tokens_in_memory
from ppo_rlhf.passes.response_logprobs import most_logits
from ppo_rlhf.ppo.optimisers import moment_bytes
from ppo_rlhf.ppo.precision import frozen_dtype, trained_dtype
from ppo_rlhf.ppo.run_setup import build_critic, freeze_critic, policy_to_train, start_dtype
from ppo_rlhf.ppo.token_budget import (
    UpdateBytes,
    copied_bytes,
    follows_memory,
    gradient_bytes,
    kept_activations,
    update_bytes,
)
from ppo_rlhf.runtime.log_lines import quiet_transformers

PROCESS_BYTES = 600 * 2**20
"""Resident memory in bytes of `kedro run` after its libraries are imported and have computed something (measured on
Linux)."""
UNLIMITED = 2**62
"""Stands for the free bytes if a plan has no limit."""
MOMENTS, AVERAGE = "optimisers: two moments of each trained weight", "policy: moving average"


@dataclass(frozen=True)
class RunShape:
    """The models, the sizes and the machine that a memory plan is made for, in addition to the settings of PPO."""

    policy: PretrainedConfig  # configuration of the SFT model, from which the policy starts
    prompt_length: int  # length of the longest prompt in tokens
    # Configurations of the reward models, the one from which a critic starts first
    reward_models: tuple[PretrainedConfig, ...] = ()
    on_cpu: bool = True  # True if the run computes on the CPU, in the host's memory
    evaluation_rows: int = 0  # batch size of the evaluations during training; 0: no evaluations during training
    processes: int = 1  # world size of the run; the plan counts the bytes of one process
    trust_remote_code: bool = False  # whether Python code in the models' directories may be executed
    # Free bytes of memory for one process; None: micro-batches are not cut to fit into the free memory
    free: int | None = None
    memory: int = UNKNOWN_CARD  # bytes of the device's whole memory for one process
    shared_length: int = 0  # tokens with which all prompts begin; 0: too few to compute them once a pass


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one process needs, and the batch sizes that the run will use."""

    held: dict[str, int]  # bytes held during the whole run, by name: weights, moments, moving average
    # Peak bytes of each phase of an iteration, including the bytes in `held`, in the order of the phases
    phases: dict[str, int]
    on_host: int  # bytes of offloaded models in the host's memory
    trained: int  # bytes of the weights that train
    exported: int  # bytes of the exported policy and of the exported critic together
    rollout_rows: int  # number of responses decoded at the same time
    update_rows: int  # number of responses in one micro-batch of the update
    update_tokens: int | None  # maximum number of tokens in one micro-batch; None: no limit
    shared_length: int  # tokens with which all prompts begin, which a pass computes once

    @property
    def peak(self) -> str:
        """The name of the phase that needs the most bytes."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def needed(self) -> int:
        """Bytes that the phase with the largest peak (`peak`) needs."""
        return self.phases[self.peak]

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint on disk: trained weights, optimiser moments and the moving average of the weights."""
        return self.trained + self.held[MOMENTS] + self.held.get(AVERAGE, 0)


class _Sizes(NamedTuple):
    """Bytes of the models of a run and of their optimisers."""

    weights: dict[str, int]  # bytes of each model's weights, by the model's name
    trained: tuple[int, int]  # bytes of the trained weights of the policy, and of the critic
    moments: int  # bytes of the optimisers' moments
    # Bytes of copies in the computation's dtype: autocast's copies, or one dequantised layer of 4-bit weights
    copied: int
    exported: int  # bytes of the exported policy's weights, and of the exported critic's
    activations: int  # bytes of activations that an update keeps for one token
    layer: int  # bytes of one token's activations in one layer of the policy
    scored_layer: int  # bytes of one token's activations in one layer of a model that scores whole sequences
    embedding: int  # bytes of the policy's embedding if it trains, else 0
    is_tied: bool  # whether the embedding is the language-model head's weight, too
    shares: bool  # whether the policy's attention, by its configuration, lets a pass compute a common beginning once


def plan_memory(config: PPOConfig, shape: RunShape) -> MemoryPlan:
    """Return the memory that a run needs in each phase if every prompt and every response has its greatest length.

    Raises:
        ConfigError: `ppo.value_model` starts the critic from the reward model, and the run has no reward model.
        ModelError: An option does not fit the architecture.
    """
    sizes = _sizes(config, shape)
    waiting = {"reference policy": config.offload_reference_policy}
    waiting |= dict.fromkeys(_names(shape.reward_models), config.offload_reward_model)
    offloaded = {name: size for name, size in sizes.weights.items() if waiting.get(name)}
    held = {f"{name}: weights": size for name, size in sizes.weights.items() if name not in offloaded}
    held[MOMENTS] = sizes.moments
    if config.ema_decay is not None:
        held[AVERAGE] = sizes.trained[0]

    text, number = shape.policy.get_text_config(), frozen_dtype(config).itemsize
    tokens = shape.prompt_length + config.response_length
    scored_row, brought = tokens * sizes.scored_layer, max([sizes.copied, *offloaded.values()])
    shared = shape.shared_length if sizes.shares else 0

    def passed(rows: int) -> int:
        """Return by how many tokens a pass of rows fills memory."""
        return tokens_in_memory(rows * tokens, shared * (rows - 1))

    decoded_row = decoding_bytes(text, shape.prompt_length, tokens, sizes.layer, number)
    left = (UNLIMITED if shape.free is None else shape.free) - sum(held.values()) - brought
    # `kl_estimator=full` keeps the reference policy's logits in addition to the policy's logits
    models_scored = 2 if config.kl_estimator == "full" else 1
    held_logits = most_logits(shape.memory)

    def logits(rows: int) -> int:
        return min(rows * config.response_length * text.vocab_size, held_logits) * number

    def rollout(rows: int) -> int:
        return rows * decoded_row + sizes.copied

    # A pass without gradients keeps only one layer or one chunk of logits in memory at a time
    def scoring(rows: int) -> int:
        return max(passed(rows) * sizes.scored_layer, models_scored * logits(rows)) + brought

    def update(rows: int) -> UpdateBytes:
        accumulates = config.local_mini_batch_size > rows
        gradients = gradient_bytes(sum(sizes.trained), exchanged=shape.processes > 1, accumulated=accumulates)
        # A large embedding's new gradient waits for a tied head's, and is then added to the earlier micro-batches'
        if shape.on_cpu:
            gradients += sizes.embedding * (sizes.is_tied + accumulates)
        counted = {"copied": sizes.copied, "kept": sizes.activations, "held": held_logits}
        return update_bytes(config, shape.policy, tokens=tokens, gradients=gradients, **counted)

    rows = scored = _most_rollout_rows(config)
    if config.local_rollout_forward_batch_size is None:
        rows = in_equal_parts(rows, decoded_row, left, rows)
        scored = scored_at_a_time(scored, scored_row, left, on_cpu=shape.on_cpu)
    most_tokens = config.max_tokens_per_micro_batch
    if shape.free is not None and follows_memory(config, torch.device("cpu" if shape.on_cpu else "cuda")):
        most_tokens = update(0).tokens_in(shape.free - sum(held.values()))
    micro = micro_batch_rows(config, passed, most_tokens)
    beyond_held = {
        "rollout": rollout(rows),
        "scoring": scoring(max(scored, micro)),
        "update": update(micro).needed(passed(micro), micro * config.response_length * text.vocab_size),
    }
    if shape.evaluation_rows:
        beyond_held["evaluation"] = max(rollout(shape.evaluation_rows), scoring(shape.evaluation_rows))
    phases = {name: sum(held.values()) + size for name, size in beyond_held.items()}
    return MemoryPlan(
        held=held,
        phases=phases,
        on_host=sum(offloaded.values()),
        trained=sum(sizes.trained),
        exported=sizes.exported,
        rollout_rows=rows,
        update_rows=micro,
        update_tokens=most_tokens,
        shared_length=shared,
    )


def _most_rollout_rows(config: PPOConfig) -> int:
    return min(config.local_rollout_forward_batch_size or config.local_batch_size, config.local_batch_size)


def micro_batch_rows(config: PPOConfig, passed: Callable[[int], int], most_tokens: int | None) -> int:
    """Return the number of responses in one micro-batch.

    `passed` gives the tokens of a micro-batch of so many rows; `most_tokens` is the most tokens in a micro-batch, None
    if unlimited.
    """
    rows = config.local_micro_batch_size
    return rows if most_tokens is None else max(1, bisect_right(range(1, rows + 1), most_tokens, key=passed))


def _names(reward_models: Sequence[Any]) -> list[str]:
    """Return the name of each reward model in the table of bytes: "reward model", "reward model 2", …."""
    return [f"reward model {number}".removesuffix(" 1") for number, _ in enumerate(reward_models, start=1)]


def _sizes(config: PPOConfig, shape: RunShape) -> _Sizes:
    """Build the models on the device `meta`, with the functions that a run uses, and count their bytes."""
    trusted = {"trust_remote_code": shape.trust_remote_code}
    frozen = frozen_dtype(config)
    with torch.device("meta"), quiet_transformers():
        reference = AutoModelForCausalLM.from_config(shape.policy, dtype=start_dtype(config), **trusted)
        reference.requires_grad_(False)
        linear = [module for module in reference.base_model.modules() if isinstance(module, nn.Linear | Conv1D)]
        base = reference
        if not config.use_peft:
            base = AutoModelForCausalLM.from_config(shape.policy, dtype=trained_dtype(config), **trusted)
            if frozen.itemsize == 2:
                cast_linear_weights(reference, frozen)
        policy = policy_to_train(base, config)
        reward_models = [
            AutoModelForSequenceClassification.from_config(each, dtype=frozen, **trusted)
            for each in shape.reward_models
        ]
        stored = None
        if config.value_model == "pretrained":  # assume that the pretrained critic has as many weights as the policy
            stored = CausalLMRewardModel(CausalLMRewardConfig(text_config=shape.policy))
            nn.Module.to(stored, frozen)
        critic = build_critic(config, policy, next(iter(reward_models), None), stored_critic=stored)
        freeze_critic(critic, config)
    scoring = [layer_bytes(model, frozen.itemsize) for model in (reference, *reward_models)]
    in_four_bits = {id(module.weight) for module in linear} if config.load_in_4bit else set()
    known: set[int] = set()
    weights = {}
    models = {"policy": policy, "reference policy": reference}
    models |= {**dict(zip(_names(reward_models), reward_models, strict=True)), "critic": critic}
    for name, model in models.items():
        new = {
            id(t): four_bit_bytes(t) if id(t) in in_four_bits else t.nbytes
            for t in (*model.parameters(), *model.buffers())
            if id(t) not in known
        }
        known.update(new)  # count a weight that several models share only once
        weights[name] = sum(new.values())
    trainable = [[p for p in model.parameters() if p.requires_grad] for model in (policy, critic)]
    trained = [sum(p.nbytes for p in parameters) for parameters in trainable]
    moments = sum(moment_bytes(p, config) for parameters in trainable for p in parameters)
    copied = copied_bytes(config, policy)
    embedding, head = cast(nn.Embedding, policy.get_input_embeddings()).weight, policy.get_output_embeddings()
    as_trained = trained_dtype(config)
    exported = reference.num_parameters() * as_trained.itemsize
    if config.export_critic:
        exported += sum(weight.numel() for weight in critic.backbone.parameters()) * as_trained.itemsize
    return _Sizes(
        weights=weights,
        trained=(trained[0], trained[1]),
        moments=moments,
        copied=copied,
        exported=exported,
        activations=kept_activations(policy, critic, frozen.itemsize),
        layer=scoring[0],
        scored_layer=max(scoring),
        embedding=embedding.nbytes if embedding.requires_grad else 0,
        is_tied=getattr(head, "weight", None) is embedding,
        shares=has_plain_attention(reference),
    )


Changes = dict[str, Any]


class Suggestion(NamedTuple):
    """Settings of PPOConfig to change, the price of the change in words, and the bytes that one process then needs."""

    changes: Changes
    price: str
    needed: int


def suggestions(config: PPOConfig, shape: RunShape) -> Iterator[Suggestion]:
    """Yield each change that alone lowers the peak by at least 2 %, the cheapest first."""
    needed = plan_memory(config, shape).needed
    for price, changes_of in _STEPS:
        changes = changes_of(config)
        if shape.on_cpu and any(changes.get(name) for name in OFFLOADING_FIELDS):
            continue
        try:
            lower = plan_memory(replace(config, **changes), shape).needed
        except ConfigError:  # another setting of the run forbids the suggested change
            continue
        if lower <= 0.98 * needed:
            yield Suggestion(changes, price, lower)


def _smaller_micro_batches(c: PPOConfig) -> Changes:
    """Split the same batch into micro-batches of at most half the size. No micro-batch is larger than a minibatch."""
    rows = c.per_device_train_batch_size
    while rows % 2 == 0 and rows >= c.local_micro_batch_size:
        rows //= 2
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": c.local_batch_size // rows}


def _shared_critic(c: PPOConfig) -> Changes:
    """Replace the critic by a value head on the policy, which needs a higher learning rate than a whole critic."""
    return {"value_model": "shared", "value_learning_rate": head_rate(c.learning_rate)}


_STEPS: tuple[tuple[str, Callable[[PPOConfig], Changes]], ...] = (
    (
        "the same numbers except for rounding, slower rollouts",
        lambda c: {"local_rollout_forward_batch_size": max(1, _most_rollout_rows(c) // 2)},
    ),
    ("the same batch in smaller micro-batches: the same numbers except for rounding", _smaller_micro_batches),
    ("the same numbers, an update takes about a third longer", lambda c: {"gradient_checkpointing": True}),
    ("the same numbers, a copy to the GPU each iteration", lambda c: {"offload_reference_policy": True}),
    ("the same numbers, a copy to the GPU each iteration", lambda c: {"offload_reward_model": True}),
    ("frozen models and activations in 16 bits", lambda c: {} if c.dtype == "float16" else {"dtype": "bfloat16"}),
    ("another critic: a value head on the policy", _shared_critic),
    (
        "adapters train instead of all weights, at higher learning rates",
        lambda c: {"use_peft": True, "offload_reference_policy": False},
    ),
    ("AdamW's moments in 8 bits, by bitsandbytes: other numbers", lambda c: {"optim": "adamw_8bit"}),
    (
        "adapters on weights in 4 bits, by bitsandbytes: the policy is the given one up to the rounding to 4 bits",
        lambda c: {"use_peft": True, "load_in_4bit": True, "offload_reference_policy": False},
    ),
)
"""Changes of settings that save memory, the cheapest first: the price of each change, and the function that returns the
changed settings."""
