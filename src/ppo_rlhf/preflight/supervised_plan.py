"""What SFT and the training of a reward model need: a line of memory and time of each in `kedro doctor`.

All weights train in float32, by AdamW, so weights, gradients and moments take 16 bytes a weight. Activations are
counted as in an update of PPO (`passes.free_memory.activation_bytes`), for a batch of the longest sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.context_length import context_length
from ppo_rlhf.passes.forward import backbone_of
from ppo_rlhf.passes.free_memory import activation_bytes, available_memory
from ppo_rlhf.ppo.precision import resolve_device
from ppo_rlhf.preflight.memory import PROCESS_BYTES
from ppo_rlhf.preflight.memory_plan import gib, policy_config
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.preflight.run_time import MOST_SECONDS, NotTimedError, Work, in_words, time_passes
from ppo_rlhf.runtime.log_lines import quiet_transformers
from ppo_rlhf.supervised.demonstrations import encode_demonstrations
from ppo_rlhf.supervised.optimisation import OptimisationConfig
from ppo_rlhf.supervised.preferences import tokenise_preferences
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig

BYTES_A_WEIGHT = 16
"""Weight, gradient and AdamW's two moments in float32."""
MOST_READ = 500
"""The most rows of a table whose tokens are counted."""


@dataclass(frozen=True)
class Training:
    """One supervised training of a run."""

    group: str  # its group of parameters
    rows: str  # what a row is, in the plural
    config: OptimisationConfig
    count: int  # number of rows that train
    sequences: int  # sequences of a row: 2 for a pair
    lengths: list[int]  # tokens of sequences, of at most `MOST_READ` rows

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        config = self.config
        a_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return config.max_steps or math.ceil(config.num_train_epochs * math.ceil(self.count / a_step))


def describe(run: RunRequest) -> Iterator[tuple[Literal["ok", "problem"], str, str]]:
    """Yield (level, group, line) for each supervised training of a run whose settings and tables are checked."""
    start = run.data.get("sft_policy")
    model = policy_config(run, None) if start is None else start.config()
    tokenizer = run.tokenizers.get(run.start) if start is None else start.tokenizer()
    if model is None or tokenizer is None:
        return
    for training in _trainings(run, model, tokenizer):
        device = resolve_device(training.config.device)
        free = available_memory(device)[0]
        needed = needed_bytes(training, model) + (PROCESS_BYTES if device.type == "cpu" else 0)
        line = (
            f"{gib(needed)} needed of {gib(free)} free on {device}, {training.steps:,} steps of {training.rows} of "
            f"{mean(training.lengths):.0f} tokens on average, {max(training.lengths)} at most"
        )
        if needed <= free:
            yield "ok", training.group, f"{line}; {_time(training, model, device)}"
            continue
        fix = "with as many more gradient_accumulation_steps, or set gradient_checkpointing or max_length"
        yield "problem", training.group, f"{line}: lower {training.group}.per_device_train_batch_size, {fix}."


def needed_bytes(training: Training, model: PretrainedConfig) -> int:
    """Return the bytes that a training needs beside the process, if all sequences of a batch are the longest."""
    config, text = training.config, model.get_text_config()
    with torch.device("meta"), quiet_transformers():
        built = AutoModelForCausalLM.from_config(model, dtype=torch.float32)
    weights, number = sum(weight.numel() for weight in built.parameters()), 2 if config.bf16 else 4
    kept = activation_bytes(backbone_of(built), number)
    if config.gradient_checkpointing:
        kept = text.num_hidden_layers * text.hidden_size * number + kept // text.num_hidden_layers
    tokens = config.per_device_train_batch_size * training.sequences * max(training.lengths)
    copied = 2 * weights if config.bf16 else 0  # autocast's copies
    head = built.get_output_embeddings()
    # A tied head's gradient waits for the embedding's
    tied = isinstance(head, nn.Linear) and head.weight is built.get_input_embeddings().weight
    waiting = head.weight.nbytes if tied and training.sequences == 1 else 0
    return BYTES_A_WEIGHT * weights + copied + waiting + tokens * kept


def _trainings(run: RunRequest, model: PretrainedConfig, tokenizer: object) -> Iterator[Training]:
    context = context_length(model)
    sft, demonstrations = run.group("supervised_finetuning", SupervisedFinetuningConfig), run.data.get("demonstrations")
    if sft is not None and run.writes("sft_policy") and demonstrations is not None:
        few = demonstrations.head(MOST_READ)
        rows = encode_demonstrations(few, tokenizer, sft.longest_sequence(context))  # type: ignore[arg-type]
        lengths = [len(ids) for ids in rows.input_ids]
        yield Training("supervised_finetuning", "texts", sft, len(demonstrations), 1, lengths)
    reward, pairs = run.group("reward_modelling", RewardModellingConfig), run.data.get("checked_preferences")
    if reward is None or not run.writes("reward_model"):
        return
    prompts, ppo = run.data.get("prompt_dataset"), run.group("ppo", PPOConfig)
    given = 0 if pairs is None else len(pairs)  # without given preferences the node makes an empty table
    if pairs is not None and given:
        read = tokenise_preferences(pairs.head(MOST_READ), tokenizer)  # type: ignore[arg-type]
        lengths = [len(ids) for name in ("chosen_ids", "rejected_ids") for ids in read[name]]
    elif prompts is not None and ppo is not None:  # the run samples its pairs
        lengths = [length + ppo.response_length for length in prompts.lengths[:MOST_READ]]
    else:
        return
    limit = reward.longest_sequence(context)
    lengths = [length for length in lengths if limit is None or length <= limit]
    count = round((given or reward.pairs) * (1 - reward.held_out_share))
    if lengths:
        yield Training("reward_modelling", "pairs", reward, count, 2, lengths)


def _time(training: Training, model: PretrainedConfig, device: torch.device) -> str:
    """Return in words how long a training takes here, without the passes over held-out rows."""
    config, tokens = training.config, max(2, round(mean(training.lengths)))
    learnt = tokens - 1 if training.sequences == 1 else 1  # a reward model has no logits of tokens
    passes = PPOConfig(
        response_length=learnt,
        per_device_train_batch_size=config.per_device_train_batch_size,
        dtype="bfloat16" if config.bf16 else "float32",
        gradient_checkpointing=config.gradient_checkpointing,
        device=device.type,
    )
    try:
        times = time_passes(passes, Work(model, tokens - learnt, 1), device, time.monotonic() + MOST_SECONDS)
    except NotTimedError as reason:
        return f"not timed: {reason}"
    a_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * training.sequences
    return f"about {in_words(training.steps * (a_step * times.backward + times.optimiser))}"
