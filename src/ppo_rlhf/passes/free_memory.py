"""Computes how many sequences fit into the free memory in a forward pass without gradients.

The memory plan of `kedro doctor` calls the same functions (docs/memory.md): activations of a token, keys and values,
bytes to decode a response, sequences at a time, and a process's share of the memory are computed here and only here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.core.logprobs import card_bytes
from ppo_rlhf.passes.forward import backbone_of
from ppo_rlhf.runtime.processes import process_count

KEPT = 1.5
"""Peak bytes of activations, divided by the bytes of the inputs and outputs of linear layers (measured on Llama: 1.13
in float32, 1.54 in bfloat16). Norms, position embeddings and the gradients of activations take the memory beyond the
inputs and outputs of linear layers."""
MOST_ON_CPU = 64
"""The most sequences of a forward pass over whole sequences on a CPU: 256 sequences of 48 tokens took 1.6 times as long
in one forward pass as in four forward passes."""
USED = 0.8
"""Share of the free memory that a pass may take: the estimated bytes may be off by a third, and free memory is
fragmented."""


def sequences_at_a_time(model: PreTrainedModel, count: int, tokens: int, *, decoded_from: int | None = None) -> int:
    """Return how many of `count` sequences to process at a time, in chunks of equal size; at least 1.

    The model computes on its own device under the caller's autocast: in passes over whole sequences if `decoded_from`
    is None, else token by token after a prompt.

    Args:
        model: The model whose passes need the memory.
        count: Number of sequences.
        tokens: Length of the longest sequence.
        decoded_from: Length of the longest prompt, if the sequences are decoded token by token.
    """
    device, number = model.device, _number_bytes(model)
    one_layer, free = layer_bytes(model, number), free_bytes(device)
    if decoded_from is None:
        return scored_at_a_time(count, tokens * one_layer, free, on_cpu=device.type == "cpu")
    row = decoding_bytes(model.config.get_text_config(), decoded_from, tokens, one_layer, number)
    return in_equal_parts(count, row, free, count)


def scored_at_a_time(count: int, row_bytes: int, free_bytes: int, *, on_cpu: bool) -> int:
    """Return how many of `count` sequences a pass over whole sequences takes if each needs `row_bytes`."""
    return in_equal_parts(count, row_bytes, free_bytes, MOST_ON_CPU if on_cpu else count)


def _number_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one number in a model's activations, keys and values, under the caller's autocast."""
    device = model.device.type
    casts = torch.is_autocast_enabled(device) and model.dtype != torch.float64
    return (torch.get_autocast_dtype(device) if casts else model.dtype).itemsize


def in_equal_parts(count: int, row_bytes: int, free_bytes: int, most: int) -> int:
    """Return how many rows a part has if `count` rows are cut into as few equal parts as the free memory allows.

    A part has at most `most` rows.
    """
    fitting = max(1, min(most, int(USED * free_bytes) // max(1, row_bytes)))
    parts = -(-count // fitting)
    return -(-count // max(1, parts)) or 1


def layer_bytes(model: PreTrainedModel, number: int) -> int:
    """Return the bytes of one token's activations in one layer, which is all that a pass without gradients keeps."""
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    return activation_bytes(backbone_of(model), number) // layers


def activation_bytes(backbone: nn.Module, number: int) -> int:
    """Return the bytes of one token's activations in all layers; `number` is the bytes of one number."""
    widths = 0
    for name, module in backbone.named_modules():
        # A frozen layer with an adapter, W x + B A x, keeps x and the few numbers A x: less than a layer that trains
        if ".lora_" in name:
            continue
        # Count a linear layer's inputs x outputs, because 4-bit weights are packed into another shape
        if isinstance(module, nn.Linear):
            widths += module.in_features + module.out_features
        elif isinstance(module, Conv1D):
            widths += sum(module.weight.shape)
    return round(KEPT * widths) * number


def decoding_bytes(text: PretrainedConfig, prompt_length: int, tokens: int, one_layer: int, number: int) -> int:
    """Return the bytes to decode one response: keys and values, and the prompt's pass or a step's logits.

    Only the larger of the prompt's pass and the logits counts, since the pass and the logits do not exist at the same
    time. `tokens` counts prompt and response. `one_layer` is the bytes of one token's activations in one layer, and
    `number` the bytes of one number.
    """
    step = text.vocab_size * (number + 3 * 4)  # bytes of one row of logits, and of their probabilities in float32
    cache = tokens * getattr(text, "num_hidden_layers", 1) * _cache_width(text) * number
    return int(cache + max(step, prompt_length * one_layer))


def available_memory(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the free bytes on a device and on the host, within the container's limit.

    On a CPU the free bytes on device and host are equal.

    The page cache of files that were read or written counts as free.
    """
    host = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = cgroup / "memory.stat"
        kinds = stat.read_text(encoding="ascii") if stat.is_file() else ""
        cached = re.search(r"^inactive_file ([0-9]+)$", kinds, re.MULTILINE)
        host = min(host, max(0, limit - used + int(cached[1] if cached else 0)))
    # The process is in no control group (cgroup), or the cgroup has no memory limit (`max`)
    except (OSError, ValueError):
        pass
    return (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host), host


def whole_memory(device: torch.device, processes: int) -> int:
    """Return the bytes of a device's whole memory for one process; on a CPU the container's limit counts."""
    on_cpu = device.type == "cpu"
    return process_share(host_bytes() if on_cpu else card_bytes(device), on_cpu=on_cpu, processes=processes)


@cache
def host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the host's whole memory, or the container's limit."""
    host = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):  # no control group, or one without a limit (`max`)
        host = min(host, int((cgroup / "memory.max").read_text(encoding="ascii")))
    return host


def process_share(free: int, *, on_cpu: bool, processes: int) -> int:
    """Return one process's share of free bytes: processes share the host's memory, and each has its own GPU."""
    return free // processes if on_cpu else free


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device.

    Free blocks of torch's allocator count as free.
    """
    free = process_share(available_memory(device)[0], on_cpu=device.type != "cuda", processes=process_count())
    if device.type != "cuda":
        return free
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _cache_width(text: Any) -> int:
    """Return the KV-cache elements per token per layer: 2 · key-value heads · head width, or 2 · hidden width without
    heads.
    """
    heads = getattr(text, "num_attention_heads", None)
    # state-space models have no attention heads, and some models have different numbers of heads in each layer
    if not isinstance(heads, int):
        return 2 * int(text.hidden_size)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    return 2 * int(key_heads) * int(getattr(text, "head_dim", None) or text.hidden_size // heads)
