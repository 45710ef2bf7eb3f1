"""Builds the tokenizer that a GGUF file describes, by the rules of llama.cpp (`src/llama-vocab.cpp`).

The file has the vocabulary, but names the split of a text into words instead of spelling it out. A name without a row
in `SPLITS` is refused, because another split gives other tokens than those that the model was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppo_rlhf.models.gguf_keys import Keys

BEGIN_OF_WORD = "▁"
PRE = "tokenizer.ggml.pre"


class Kind(IntEnum):
    """What a token is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Split:
    """How byte-level BPE splits a text into words, within which it merges."""

    words: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    whole_words: bool = False  # whether a word that is a token is not made from merges
    adds_begin: bool = False  # whether a text begins with the begin token, if the file does not say


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = Split(
    _by_pattern(rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
    whole_words=True,
    adds_begin=True,
)
_QWEN2 = Split(_by_pattern(rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"), normalizers.NFC)

SPLITS = {
    "gpt-2": Split(_gpt2),
    "smollm": Split(_digits_apart),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}
"""The splits of byte-level BPE, by the names that llama.cpp gives them."""


def tokenizer_of(keys: Keys) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file.

    Raises:
        ValueError: A part of the tokenizer is of a kind that is not known here, or is missing.
    """
    tokens = keys.take_texts("tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens) or not tokens:
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens):,} tokens, {len(set(tokens)):,} of them different")
    kinds = [Kind(int(kind)) for kind in keys.take_numbers("tokenizer.ggml.token_type")]
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds):,} entries for {len(tokens):,} tokens")
    indices = {name: token_id(keys, key, len(tokens)) for name, key in _SPECIAL.items()}
    special = {name: None if index is None else tokens[index] for name, index in indices.items()}
    match keys.take("tokenizer.ggml.model", str):
        case "gpt2":
            backend, adds_begin = _byte_level(keys, tokens)
        case "llama":
            backend, adds_begin = _sentence_pieces(keys, tokens, kinds, special["unk_token"]), True
        case other:
            raise ValueError(f"tokenizer.ggml.model={other} has no counterpart")
    for kind, is_special in ((Kind.UNKNOWN, True), (Kind.CONTROL, True), (Kind.USER_DEFINED, False)):
        added = [token for token, is_kind in zip(tokens, kinds, strict=True) if is_kind == kind]
        backend.add_tokens([AddedToken(token, normalized=False, special=is_special) for token in added])
    _add_begin_and_end(backend, keys, adds_begin, special)
    template = keys.take("tokenizer.chat_template", str, None)
    options: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)
    tokenizer.chat_template = template
    return tokenizer


_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def token_id(keys: Keys, key: str, count: int) -> int | None:
    """Return the number of a token that a key names; None without the key.

    Raises:
        ValueError: There are only `count` tokens.
    """
    index = keys.take(key, int, None)
    if index is not None and index >= count:
        raise ValueError(f"{key}={index} is not below the number of tokens, {count:,}")
    return index


def _byte_level(keys: Keys, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer of a vocabulary of bytes, as GPT-2's, and whether a text begins with the begin token."""
    name = keys.take(PRE, str)
    if (split := SPLITS.get(name)) is None:
        raise ValueError(
            f"{PRE}={name}, a split of texts into words that is not known here; known: {', '.join(SPLITS)}"
        )
    if keys.take("tokenizer.ggml.add_space_prefix", bool, False):
        raise ValueError("tokenizer.ggml.add_space_prefix=True has no counterpart for tokenizer.ggml.model=gpt2")
    if not (pairs := keys.take_texts("tokenizer.ggml.merges")):
        raise ValueError("tokenizer.ggml.merges is missing")
    if odd := next((pair for pair in pairs if pair.count(" ") != 1), None):
        raise ValueError(f"tokenizer.ggml.merges has {odd!r:.60}")
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
    if split.normalizer is not None:
        backend.normalizer = split.normalizer()
    backend.pre_tokenizer, backend.decoder = split.words(), decoders.ByteLevel()
    return backend, split.adds_begin


def _sentence_pieces(keys: Keys, tokens: Sequence[str], kinds: Sequence[Kind], unknown: str | None) -> Tokenizer:
    """Return the tokenizer of a vocabulary of SentencePiece's BPE (Llama 2's kind).

    A text, and each part of it after a special token, begins with a space if the file says so or says nothing.
    """
    if (name := keys.take(PRE, str, "default")) != "default":
        raise ValueError(f"{PRE}={name} has no counterpart for tokenizer.ggml.model=llama")
    scores = keys.take_numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores):,} entries, not {len(tokens):,} finite numbers")
    if keys.take_texts("tokenizer.ggml.merges"):
        raise ValueError("tokenizer.ggml.merges has no counterpart for tokenizer.ggml.model=llama")
    pieces = {token: score for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == Kind.NORMAL}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    spaced = keys.take("tokenizer.ggml.add_space_prefix", bool, True)
    begin = [normalizers.Prepend(BEGIN_OF_WORD)] if spaced else []
    backend.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", BEGIN_OF_WORD)])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    texts = [decoders.Replace(BEGIN_OF_WORD, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*texts, *strip])
    return backend


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make a piece, those of the piece with the highest score first.

    Of pairs that make one piece the order changed nothing in 72,000 random texts and 2,400 random vocabularies.

    Raises:
        ValueError: Two of these pieces have one score: llama.cpp joins the pair that stands first in the text, which
            merges cannot say.
    """
    order = {piece: index for index, piece in enumerate(scores)}
    pairs = [
        (left, right, score)
        for piece, score in scores.items()
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        if left in order and right in order
    ]
    made = {score: left + right for left, right, score in pairs}
    if tied := next(((left + right, score) for left, right, score in pairs if left + right != made[score]), None):
        raise ValueError(f"tokenizer.ggml.scores has {tied[1]:g} for both {tied[0]!r:.60} and {made[tied[1]]!r:.60}")
    pairs.sort(key=lambda pair: (-pair[2], order[pair[0]], order[pair[1]]))
    return [(left, right) for left, right, _ in pairs]


def _add_begin_and_end(backend: Tokenizer, keys: Keys, adds_begin: bool, special: dict[str, str | None]) -> None:
    """Let a tokenizer put the begin token before a text and the end token after a text, if the file says so."""
    wanted = {
        "bos_token": keys.take("tokenizer.ggml.add_bos_token", bool, adds_begin),
        "eos_token": keys.take("tokenizer.ggml.add_eos_token", bool, False),
    }
    named = {name: special[name] for name, is_wanted in wanted.items() if is_wanted}
    if missing := next((name for name, token in named.items() if token is None), None):
        raise ValueError(f"the key {_SPECIAL[missing]} is missing, although each text gets this token")
    begin, end = named.get("bos_token"), named.get("eos_token")
    if begin is None and end is None:
        return
    single = [*filter(None, [begin]), "$A", *filter(None, [end])]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(filter(None, (begin, end)))]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
