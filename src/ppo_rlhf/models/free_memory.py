"""How many sequences a pass without gradients takes at a time: as many as fit into the memory that is free.

The formulas are those of `kedro doctor` (docs/memory.md).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.captures import pool_bytes
from ppo_rlhf.models.forward import backbone_of
from ppo_rlhf.runtime.processes import process_count

KEPT = 1.5
"""Peak of the activations over the inputs and outputs of linear layers: norms and position embeddings keep the rest
(Llama: 1.13 in float32, 1.54 in bfloat16), and the backward pass holds gradients of activations."""
MOST_ON_CPU = 64
"""Sequences that a whole pass takes on a CPU: 256 of 48 tokens took 1.6 times as long together as in four passes."""
USED = 0.8
"""Share of the free memory that a pass may take: the estimate is right to a third, and a part is in pieces."""


def sequences_at_a_time(
    model: PreTrainedModel,
    count: int,
    tokens: int,
    *,
    decoded_from: int | None = None,
    used_again: int = 0,
    most: int | None = None,
) -> int:
    """Return how many of `count` sequences to take at a time, in parts of equal size; at least 1.

    The longest has so many `tokens`. The model computes them where it is, under the caller's autocast: in whole passes,
    or token by token after the longest prompt's `decoded_from` tokens. Bytes that are taken, and that these passes use
    again, count as free. `most` is a limit of its own.
    """
    device, text = model.device, model.config.get_text_config()
    number = number_bytes(model)
    one_layer = activation_bytes(backbone_of(model), number) // getattr(text, "num_hidden_layers", 1)
    row = tokens * one_layer if decoded_from is None else decoding_bytes(text, decoded_from, tokens, one_layer, number)
    if most is None:
        most = MOST_ON_CPU if device.type == "cpu" and decoded_from is None else count
    return in_equal_parts(count, row, free_bytes(device) + used_again, most)


def number_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one number of a model's activations, keys and values, under the caller's autocast."""
    device = model.device.type
    casts = torch.is_autocast_enabled(device) and model.dtype != torch.float64
    return (torch.get_autocast_dtype(device) if casts else model.dtype).itemsize


def in_equal_parts(count: int, row_bytes: int, free_bytes: int, most: int) -> int:
    """Return the rows of each part if `count` rows are cut into as few equal parts as fit into the free memory.

    No part has more than `most` rows.
    """
    fitting = max(1, min(most, int(USED * free_bytes) // max(1, row_bytes)))
    parts = -(-count // fitting)
    return -(-count // max(1, parts)) or 1


def activation_bytes(backbone: nn.Module, number: int) -> int:
    """Return the bytes that the activations of one token take in all layers; `number` is the bytes of one number."""
    widths = 0
    for module in backbone.modules():
        if isinstance(module, nn.Linear):  # 4-bit weights have another shape
            widths += module.in_features + module.out_features
        elif isinstance(module, Conv1D):
            widths += sum(module.weight.shape)
    return round(KEPT * widths) * number


def decoding_bytes(text: PretrainedConfig, prompt_length: int, tokens: int, one_layer: int, number: int) -> int:
    """Return the bytes of a response that is decoded: its keys and values, and its prompt's pass or a step's logits.

    `tokens` are those of prompt and response, `one_layer` a token's bytes of activations, `number` those of a number.
    """
    step = text.vocab_size * (number + 3 * 4)  # logits, and their probabilities in float32
    return cache_bytes(text, tokens, number) + int(max(step, prompt_length * one_layer))


def cache_bytes(text: PretrainedConfig, tokens: int, number: int) -> int:
    """Return the bytes of the keys and values of so many tokens; `number` is the bytes of one number."""
    return int(tokens * getattr(text, "num_hidden_layers", 1) * _cache_width(text) * number)


def available_memory(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the free bytes on a device and on the host; a container's limit counts. On the CPU both are the host's.

    Files that were read or written stay in memory as long as there is room, and count as free.
    """
    host = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = cgroup / "memory.stat"
        cached = (
            re.search(r"^inactive_file (\d+)$", stat.read_text(encoding="ascii"), re.MULTILINE)
            if stat.is_file()
            else None
        )
        host = min(host, max(0, limit - used + int(cached[1] if cached else 0)))
    except (OSError, ValueError):  # no control group, or no limit (`max`)
        pass
    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host), host


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still take on a device; torch's own free blocks count.

    Those in the pool of CUDA graphs do not: only a capture can take them.
    """
    free = available_memory(device)[0]
    if device.type != "cuda":
        return free // process_count()
    taken = torch.cuda.memory_allocated(device) + pool_bytes(device)
    return free + torch.cuda.memory_reserved(device) - taken


def _cache_width(text: Any) -> int:
    """Return the numbers of keys and values of one token in one layer; without heads twice the hidden width."""
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):  # a state-space model, or heads that differ by layer
        return 2 * int(text.hidden_size)
    shared = getattr(text, "num_key_value_heads", None) or heads
    return 2 * int(shared) * int(getattr(text, "head_dim", None) or text.hidden_size // heads)
