"""Adds to a saved model directory what transformers 4, and the servers built on it, look for under other names.

transformers 5 writes the base of rotary positions, and the extension of the context, into `rope_parameters`, which
version 4 does not know: it would take its defaults without a word. Nor does version 4 have `TokenizersBackend`. Version
5 reads the older names, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers import __version__ as written_by

from ppo_rlhf.models.directories import CONFIG

TOKENIZER_CONFIG = "tokenizer_config.json"
LOWEST = "4.57"
"""The lowest version of transformers that was tried, with the architectures of `TRIED` (a slow test)."""
TRIED = (
    *("bloom", "cohere", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "opt"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "smollm3", "stablelm", "starcoder2"),
)
_EXTENDED, _THETA, _PART = "rope_type", "rope_theta", "partial_rotary_factor"


def add_older_names(folder: Path) -> None:
    """Add the names that transformers 4 reads to a saved model's configuration and tokenizer, if they are there."""
    _rewrite(folder / CONFIG, _with_older_positions)
    _rewrite(folder / TOKENIZER_CONFIG, _with_older_tokenizer)


def readers(config: PretrainedConfig) -> str:
    """Return which versions of transformers read an export of a model with this configuration, for the model card."""
    if config.model_type in TRIED:
        return f"transformers {LOWEST}, the lowest version that was tried with this architecture, and later"
    return f"transformers {written_by}; older versions were not tried with this architecture"


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if path.is_file():
        content = json.loads(path.read_bytes())
        path.write_text(json.dumps(change(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_older_positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, and those within it, with version 4's names of rotary positions and type of weights."""
    nested = {key: _with_older_positions(value) if isinstance(value, dict) else value for key, value in config.items()}
    return dict(sorted({**nested, **dict(_older_names(config))}.items()))


def _older_names(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "dtype" in config and "model_type" in config:
        yield "torch_dtype", config["dtype"]
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    if set(rope) == {"full_attention", "sliding_attention"} and all(rope.values()):  # Gemma 3
        yield "rope_local_base_freq", rope["sliding_attention"][_THETA]
        rope = rope["full_attention"]
    if _THETA not in rope:
        return
    theta, part = ("rotary_emb_base", "rotary_pct") if config.get("model_type") == "gpt_neox" else (_THETA, _PART)
    yield theta, rope[_THETA]
    if _PART in rope:
        yield part, rope[_PART]
    if rope.get(_EXTENDED, "default") != "default":
        yield "rope_scaling", {key: value for key, value in rope.items() if key not in (_THETA, _PART)}


def _with_older_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(config)
    if changed.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = "PreTrainedTokenizerFast"
    # Version 4 has a mapping under this name
    if isinstance(changed.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    return dict(sorted(changed.items()))
