"""Tiny models, adapters and tokenizers for tests, with large random weights, so that outputs differ clearly.

Tests of PPO runs use these models through `ppo_runs`, with a smaller vocabulary and in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BitNetConfig,
    BitNetForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

if TYPE_CHECKING:
    from peft import PeftModel

    from ppo_rlhf.models.adapters import LoraSettings

WORDS = [*"abcdefghijklmnopqrst", "."]
VOCABULARY = ["<pad>", "<unk>", "<s>", "</s>", *WORDS]
PAD, UNKNOWN, BEGIN, END = range(4)
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' <s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
DATED_TEMPLATE = "{{ strftime_now('%d') }} " + CHAT_TEMPLATE
"""Prints the day of the month, as Llama 3's prints the date."""
KINDS = ("llama", "gpt2", "bitnet")
MAMBA = MambaConfig(vocab_size=25, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=PAD)
"""In 16 bits its hidden states have 32: it sums in 32 what its layers give."""


def word_tokenizer(
    *, vocabulary: list[str] = VOCABULARY, prepend_begin: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id per word. `prepend_begin` adds <s> before every text, as real tokenizers may."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if prepend_begin:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    begin = {"bos_token": "<s>"} if "<s>" in vocabulary else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**SPECIAL, **begin, **options})


def spaced_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama's: a token includes the space before its word; decoding drops the first space."""
    names = [word if word.startswith("<") else f"▁{word}" for word in VOCABULARY]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**SPECIAL, "bos_token": "<s>", **options})


def byte_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's without merges: one id per byte, decoded the same way at every position."""
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**SPECIAL, **options})


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's chat template without the system prompt that it adds."""


def write_gguf(
    path: Path,
    *,
    quantised: str = "Q4_1",
    architecture: str = "llama",
    seed: int = 0,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Write a Llama with a byte-level BPE tokenizer and a chat template as a GGUF file; return the model in the file.

    As llama.cpp does, matrices have the type `quantised`, the embedding is Q8_0 and norms are F32, and the rows of
    queries and keys of a Llama are stored in another order. The returned model has the numbers that the file holds.
    `keys` replaces keys of the file, or removes those that are None; `extra` has further tensors. `settings` replaces
    those of the returned model's configuration.
    """
    import gguf  # imported here: few tests need it

    letters = sorted(ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ a", "Ġ Ġ", "1 2", "12 3", "Ã ©"]
    begin = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*begin, *letters, *(merge.replace(" ", "") for merge in merges), "hat"]
    layout = architecture if architecture in ("qwen2", "qwen3") else "llama"
    config = AutoConfig.for_model(
        layout,
        **{
            "vocab_size": len(tokens),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "tie_word_embeddings": True,
            **settings,
        },
    )
    model = draw_weights(AutoModelForCausalLM.from_config(config), 0.3, seed=seed).eval()
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    values: dict[str, Any] = {
        "general.name": "Tiny",
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(begin) + [1] * (len(tokens) - len(begin)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHATML,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        if value is not None:
            adders[type(value)](key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if layout == "llama" else {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[layout.upper()], config.num_hidden_layers)
    for name, weight in model.named_parameters():
        kind = "F32" if weight.dim() == 1 else "Q8_0" if "embed" in name else quantised
        stored, n = weight.detach(), next((n for layer, n in heads.items() if layer in name), None)
        if n is not None:  # the two halves of a head's rows alternate
            stored = stored.reshape(n, 2, -1, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
        qtype = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quantize(stored.contiguous().numpy(), qtype)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), blocks, raw_dtype=qtype)
        held = torch.from_numpy(gguf.dequantize(blocks, qtype).copy()).reshape(stored.shape)
        if n is not None:
            held = held.reshape(n, -1, 2, held.shape[1]).transpose(1, 2).reshape(held.shape)
        with torch.no_grad():
            weight.copy_(held)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def set_today(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    """Set the date that transformers' chat templates see to this day of May 2031."""
    today = SimpleNamespace(now=lambda: datetime(2031, 5, day, 12, 0))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", today)


def tiny_model(
    kind: str = "llama", *, seed: int = 0, spread: float = 0.3, reward: bool = False, **overrides: Any
) -> PreTrainedModel:
    """Return a causal LM (`reward`: a GPT-2 classifier) of two layers, width 16 and weights of deviation `spread`."""
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": None}
    llama_shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    gpt2_shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config_class, model_class, shape = {
        "llama": (LlamaConfig, LlamaForCausalLM, llama_shape),
        "gpt2": (GPT2Config, GPT2ForSequenceClassification if reward else GPT2LMHeadModel, gpt2_shape),
        "bitnet": (BitNetConfig, BitNetForCausalLM, llama_shape),
    }[kind]
    model = model_class(config_class(**{**ids, **shape, **overrides}))
    return draw_weights(model, spread, seed=seed).eval()


def draw_weights(model: PreTrainedModel, deviation: float, *, seed: int = 0) -> PreTrainedModel:
    """Draw new matrices for a model, in place, large enough that outputs depend clearly on inputs; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, deviation, generator=generator)
    return model


def named_model(name: str, **sizes: Any) -> PreTrainedModel:
    """Return a new causal LM of the named transformers architecture: two layers, width 16, two experts per token."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**shape, max_position_embeddings=64, **ids, **sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def with_trained_adapter(model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0) -> PreTrainedModel:
    """Return a model with our adapter, sharing the weights of `model`, as if trained: B is not 0."""
    from ppo_rlhf.models.adapters import with_adapter  # imported here: it loads peft, which takes seconds
    from ppo_rlhf.models.averages import trained_parameters

    model = with_adapter(model, settings, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_of(
    base: PreTrainedModel, folder: Path, base_path: str, layer: str = "q_proj", *, seed: int = 1, **options: Any
) -> PeftModel:
    """Save a peft adapter with non-zero matrices, and return a copy of the base with the adapter."""
    from peft import LoraConfig, get_peft_model  # imported here: it takes seconds

    adapted: Any = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 2, "target_modules": [layer], **options}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    adapted.peft_config["default"].base_model_name_or_path = base_path
    adapted.save_pretrained(folder)
    return adapted.eval()


def with_a_block_twice() -> PreTrainedModel:
    """Return a Llama of three layers whose first two layers are the same module."""
    model = tiny_model("llama", num_hidden_layers=3)
    model.model.layers[1] = model.model.layers[0]
    return model


def not_causal_models() -> dict[str, PreTrainedModel]:
    """Return models whose hidden states depend on later tokens, with small new weights: a BERT and a Gemma 3."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": len(VOCABULARY), "max_position_embeddings": 64, "pad_token_id": PAD}
    gemma = {"head_dim": 8, "num_key_value_heads": 1, "use_bidirectional_attention": True, "eos_token_id": END}
    torch.manual_seed(0)
    return {
        "bert": BertLMHeadModel(BertConfig(**shape)).eval(),
        "gemma 3": Gemma3ForCausalLM(Gemma3TextConfig(**shape, **gemma)).eval(),
    }


def composite_config(**text: Any) -> Gemma3Config:
    """Return the configuration of a Gemma 3 that also reads images: its language model has a nested configuration."""
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 8, "patch_size": 4}, mm_tokens_per_image=4
    )


def vision_model() -> PreTrainedModel:
    """Return a Qwen 3.5 that also reads images. transformers' causal language model is only its text part."""
    shape = {"hidden_size": 16, "intermediate_size": 24}
    text = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "full_attention_interval": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 64}
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    vision = {**shape, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4, "spatial_merge_size": 1}
    config = Qwen3_5Config(text_config={**shape, **text, **linear, **ids}, vision_config=vision)
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(config).eval()


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """Save a model and a tokenizer as a plain Hugging Face directory and return its path."""
    model.save_pretrained(folder)
    (tokenizer or word_tokenizer()).save_pretrained(folder)
    return str(folder)
