"""Finds the longest sequence that a model can read, and the longest sequence that PPO may give the model."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig


def context_length(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a model can read; None if the model's architecture sets no limit."""
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        length = getattr(text_config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def usable_context(config: PretrainedConfig) -> tuple[int | None, str]:
    """Return the longest sequence, in tokens, that PPO may give a model, and a text with the reason if RoPE limits it.

    The text is "" if RoPE sets no limit. RoPE of the kinds `longrope` and `dynamic` changes its frequencies for a whole
    batch if one sequence is longer than RoPE's limit. Beyond RoPE's limit a sequence's log-probabilities would depend
    on the other sequences of its batch, but PPO compares log-probabilities from different batches (ratio, KL).
    Supervised training does not compare batches and may use the whole context.
    """
    context, steady = context_length(config), min(_steady_lengths(config), default=None)
    if steady is None or (context is not None and context < steady):
        return context, ""
    return steady, (
        f". Beyond {steady} tokens this model's RoPE changes its frequencies for the whole batch, so log-probabilities "
        "in PPO would depend on the batch"
    )


def _steady_lengths(config: PretrainedConfig) -> Iterator[int]:
    """Yield, for each RoPE that changes its frequencies with the length, the longest length without a change."""
    text_config = config.get_text_config()
    settings = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [rope for rope in settings.values() if isinstance(rope, dict)]
    for rope in by_layer_type or [settings]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            yield rope["original_max_position_embeddings"]
        elif "dynamic" in kind:
            yield text_config.max_position_embeddings
