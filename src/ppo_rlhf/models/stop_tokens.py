"""Finds the stop token ids, which end a response."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, assert_never

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.tokenizers import around_answer, special_ids

StopToken = Literal["eos", "period", "none"]
_WORD_MARKS = "Ġ▁ "  # marks of a leading space in byte-level BPE (Ġ) and SentencePiece (▁)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    *,
    stop_token: StopToken = "eos",
    stop_token_id: int | None = None,
    vocabulary: int | None = None,
) -> tuple[int, ...]:
    """Return the stop token ids, which end a response, in ascending order.

    Args:
        tokenizer: The policy's tokenizer.
        generation_config: The policy's generation config, whose `eos_token_id` may be one id or a list of ids; each of
            the ids ends a response.
        stop_token: "eos" selects the `eos_token_id` of the generation configuration, the tokenizer's end of text and
            the chat template's end of turn; "period" selects the ids of "."; "none" selects no id.
        stop_token_id: A single stop token id, which replaces the choice by `stop_token`.
        vocabulary: Number of token ids of the model; ids outside the vocabulary are left out (`ids_within`). None: the
            number is unknown.

    Raises:
        ConfigError: `stop_token_id` is not an id of the tokenizer.
        ModelError: The tokenizer has no token for `stop_token`.
    """
    if stop_token_id is not None:
        if not 0 <= stop_token_id < len(tokenizer):
            raise ConfigError(
                f"stop_token_id={stop_token_id} is not an id of the tokenizer (0 to {len(tokenizer) - 1})."
            )
        return (stop_token_id,)
    match stop_token:
        case "none":
            return ()
        case "period":
            ids = {index for token, index in tokenizer.get_vocab().items() if token.strip(_WORD_MARKS) == "."}
        case "eos":
            configured = generation_config.eos_token_id if generation_config is not None else None
            configured_ids = configured if isinstance(configured, list | tuple) else [configured]
            if not all(isinstance(index, int | None) for index in configured_ids):
                raise ModelError(
                    f"generation_config.json: eos_token_id={configured!r} is neither a token id nor a list of token "
                    "ids."
                )
            ids = {*configured_ids, tokenizer.eos_token_id, end_of_turn_id(tokenizer)} - {None}
        case unknown:
            assert_never(unknown)
    known = tuple(sorted(ids)) if vocabulary is None else ids_within(ids, vocabulary)
    if not known:
        raise ModelError(
            f"{tokenizer.name_or_path}: the tokenizer has no token for stop_token={stop_token}. "
            "Give stop_token_id, or stop_token: none to let every response run to its full length."
        )
    return known


def ids_within(ids: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """Return the stop ids below `vocabulary`, the model's number of token ids, ascending.

    A stop id outside the vocabulary is no error. A hand-made configuration with a small vocabulary may keep its
    architecture's end of text (GPT-2: 50256), and some configurations use an id outside the vocabulary to switch the
    end of text off.
    """
    return tuple(sorted(index for index in ids if 0 <= index < vocabulary))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token with which the chat template closes an assistant's turn.

    Returns None if the tokenizer has no chat template, if no special token follows the answer, or if the chat template
    refuses a question with an answer or does not write the answer.
    """
    surroundings = around_answer(tokenizer, [{"role": "user", "content": "question"}])
    if surroundings is None:
        return None
    ids, special = tokenizer.encode(surroundings[1], add_special_tokens=False), special_ids(tokenizer)
    return next((index for index in ids if index in special), None)
