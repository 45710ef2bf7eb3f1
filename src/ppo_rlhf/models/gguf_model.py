"""Turns the keys and tensors of a GGUF file into a model's configuration and weights.

Each key and each tensor has a counterpart in the model, or is known to change nothing, or the file is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ppo_rlhf.models.gguf_header import GGUFHeader, StoredTensor
from ppo_rlhf.models.gguf_keys import Keys
from ppo_rlhf.models.gguf_tokenizer import token_id, tokenizer_of

ROPE_FACTORS = "rope_freqs.weight"
OUTPUT = "output.weight"
LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""Llama 3.1's and 3.2's tokens of context before the extension, and the bounds of its wavelengths in contexts."""
_AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """The classes of transformers for an architecture of llama.cpp."""

    config: type[PretrainedConfig]
    model: type[PreTrainedModel]
    alternates: bool = False  # whether the two halves of each head's rows of queries and keys alternate in the file


ARCHITECTURES = {
    "llama": Architecture(LlamaConfig, LlamaForCausalLM, alternates=True),
    "qwen2": Architecture(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": Architecture(Qwen3Config, Qwen3ForCausalLM),
}
"""The architectures that are read, by llama.cpp's names. `llama` is also that of Mistral and SmolLM."""


@dataclass(frozen=True)
class Described:
    """The model that a GGUF file describes."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig | None  # None: the configuration's tokens are the only ones that end a text
    license: str | None


def described(header: GGUFHeader, file: BinaryIO) -> Described:
    """Return the model that a GGUF file describes, without its weights.

    Raises:
        ValueError: A key or a tensor has no counterpart, or one is missing.
    """
    keys = Keys(header.values)
    if (found := ARCHITECTURES.get(keys.architecture)) is None:
        raise ValueError(
            f"general.architecture={keys.architecture}, which is not known here; known: {', '.join(ARCHITECTURES)}"
        )
    license_name = keys.take("general.license", str, None)
    tokenizer = tokenizer_of(keys)
    ends = [token_id(keys, f"tokenizer.ggml.{name}_token_id", len(tokenizer)) for name in ("eot", "eom")]
    config = _config(keys, found, header, file, tokenizer)
    keys.refuse_others()
    _names(header, config)
    generation_config = None
    if more := [index for index in ends if index is not None]:
        of_text = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        generation_config = GenerationConfig.from_model_config(config)
        generation_config.eos_token_id = list(dict.fromkeys([*of_text, *more]))
    return Described(config, tokenizer, generation_config, license_name)


def write_weights(file: BinaryIO, header: GGUFHeader, config: PretrainedConfig, path: Path) -> None:
    """Write the weights of a GGUF file as float32 safetensors.

    Raises:
        ValueError: A tensor has no counterpart in the model of this configuration, or one is missing.
    """
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    alternates = next(found.alternates for found in ARCHITECTURES.values() if found.config is type(config))
    weights: dict[str, Tensor] = {}
    for name, own in _names(header, config).items():
        weight = _dequantised(file, header.tensors[name])
        n = next((heads[layer] for layer in heads if f".{layer}." in own), None) if alternates else None
        if n is not None:
            weight = weight.reshape(n, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        weights[own] = torch.from_numpy(np.require(weight, requirements=["C", "W"]))
    save_file(weights, path, metadata={"format": "pt"})


def _config(
    keys: Keys, found: Architecture, header: GGUFHeader, file: BinaryIO, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
    layers = keys.take("{}.block_count", int)
    if not 0 < layers <= len(header.tensors):
        raise ValueError(f"{keys.architecture}.block_count={layers} for {len(header.tensors)} tensors")
    width, heads = keys.take("{}.embedding_length", int), keys.take("{}.attention.head_count", int)
    if heads < 1:
        raise ValueError(f"{keys.architecture}.attention.head_count={heads}")
    of_head = keys.take("{}.attention.key_length", int, width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.take(f"{{}}.{key}", int, of_head)) != of_head:
            raise ValueError(f"{keys.architecture}.{key}={other}, although a head has {of_head} dimensions")
    rows = len(tokenizer)
    if (said := keys.take("{}.vocab_size", int, rows)) != rows:
        raise ValueError(f"{keys.architecture}.vocab_size={said} for {rows} tokens")
    return cast(Any, found.config)(
        architectures=[found.model.__name__],
        dtype="float32",
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=keys.take("{}.feed_forward_length", int),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys.take("{}.attention.head_count_kv", int, heads),
        head_dim=of_head,
        max_position_embeddings=keys.take("{}.context_length", int),
        rms_norm_eps=keys.take("{}.attention.layer_norm_rms_epsilon", float),
        rope_parameters=_rope(keys, of_head, header, file),
        tie_word_embeddings=OUTPUT not in header.tensors,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _rope(keys: Keys, of_head: int, header: GGUFHeader, file: BinaryIO) -> dict[str, Any]:
    """Return the settings of rotary positions, with an extension of the context if the file has one."""
    base = keys.take("{}.rope.freq_base", float, 10_000.0)
    kind = keys.take("{}.rope.scaling.type", str, "none")
    factor = keys.take("{}.rope.scaling.factor", float, 1.0) or 1.0  # llama.cpp reads 0 as 1
    before = keys.take("{}.rope.scaling.original_context_length", int, None)
    keys.take("{}.rope.scaling.finetuned", bool, False)  # says only whether the model was trained further
    factors = _rope_factors(header, file)
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if factors is not None and not np.array_equal(factors, np.ones_like(factors)):
        most = float(factors.max())
        scaled = {
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": most,
            "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH,
            "original_max_position_embeddings": LLAMA3_CONTEXT,
        }
        expected = _llama3_factors(base, of_head, most)
        is_plain = kind == "none" and factor == 1.0
        if not is_plain or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3, atol=0.0):
            raise ValueError(f"the tensor {ROPE_FACTORS} does not extend the context as Llama 3.1 does")
        return scaled
    match kind:
        case "none" if factor == 1.0:
            return plain
        case "linear" if 1.0 <= factor < math.inf:
            return plain | {"rope_type": "linear", "factor": factor}
        case "yarn" if 1.0 <= factor < math.inf and before:
            return plain | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
    raise ValueError(f"{keys.architecture}.rope.scaling.type={kind} with the factor {factor:g} has no counterpart")


def _rope_factors(header: GGUFHeader, file: BinaryIO) -> np.ndarray | None:
    stored = header.tensors.get(ROPE_FACTORS)
    return None if stored is None else _dequantised(file, stored).reshape(-1)


def _llama3_factors(base: float, of_head: int, factor: float) -> np.ndarray:
    """Return by how much Llama 3.1 divides the frequency of each pair of a head's dimensions."""
    periods = 2 * math.pi * base ** (np.arange(0, of_head, 2) / of_head)
    smooth = np.clip((LLAMA3_CONTEXT / periods - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return cast(np.ndarray, 1.0 / ((1.0 - smooth) / factor + smooth))


def _names(header: GGUFHeader, config: PretrainedConfig) -> dict[str, str]:
    """Return the names in the model of a file's tensors.

    Raises:
        ValueError: A tensor has no counterpart or another shape, or one is missing.
    """
    found = next(found for found in ARCHITECTURES.values() if found.config is type(config))
    with torch.device("meta"):
        wanted = dict(cast(Any, found.model)(config).named_parameters())
    names = {name: own for name in header.tensors if (own := _own_name(name)) is not None and own in wanted}
    for name in header.tensors:
        if name not in names and name != ROPE_FACTORS:
            raise ValueError(f"the tensor {name} has no counterpart in a {found.model.__name__}")
    if missing := next((own for own in wanted if own not in names.values()), None):
        raise ValueError(f"the weight {missing} is missing")
    shapes = {name: (header.tensors[name].shape, tuple(wanted[own].shape)) for name, own in names.items()}
    if odd := next((name for name, (shape, own) in shapes.items() if shape != own), None):
        raise ValueError(f"the tensor {odd} has the shape {shapes[odd][0]}, not {shapes[odd][1]}")
    return names


def _own_name(name: str) -> str | None:
    """Return transformers' name of a tensor; None if the tensor is of a kind without a counterpart."""
    part, _, leaf = name.rpartition(".")
    if not part.startswith("blk."):
        return f"{_AROUND[part]}.{leaf}" if part in _AROUND else None
    layer, _, kind = part.removeprefix("blk.").partition(".")
    return f"model.layers.{layer}.{_OF_A_LAYER[kind]}.{leaf}" if kind in _OF_A_LAYER else None


def _dequantised(file: BinaryIO, stored: StoredTensor) -> np.ndarray:
    """Return the numbers of a tensor as float32."""
    import gguf  # imported inside the function, because the package is an extra

    file.seek(stored.start)
    content = file.read(stored.size)
    if len(content) < stored.size:
        raise ValueError("the file has become shorter")
    kind = gguf.GGMLQuantizationType[stored.type]
    block, of_block = gguf.GGML_QUANT_SIZES[kind]
    shape = (*stored.shape[:-1], stored.shape[-1] // block * of_block)
    numbers = gguf.dequantize(np.frombuffer(content, np.uint8).reshape(shape), kind)
    return cast(np.ndarray, numbers.astype(np.float32, copy=False))
