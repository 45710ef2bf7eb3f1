"""Tokenizers: pad tokens, chat templates, texts of tokens, and training from scratch."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

from jinja2 import Environment, meta
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.passes.capabilities import pad_id_of
from ppo_rlhf.runtime.processes import warn_if_slow

SLOW_TEMPLATE_S = 5.0
PAD, UNKNOWN, END = "<pad>", "<unk>", "</s>"
_INCOMPLETE = "\ufffd"
_CONTEXT = 8  # number of tokens of context that `token_texts` decodes before the first token
# Placeholder for a message's content: the text around it is what a chat template writes around the content
CONTENT_MARK = "⁂ANSWER⁂"

MOST_KEPT = 4  # tokenizers that a process keeps
_kept: dict[Hashable, PreTrainedTokenizerBase] = {}


def kept(key: Hashable, read: Callable[[], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer of a key, which is read once: 262,144 tokens take a second and 60 to 300 MiB.

    The copies have their own pad token, side of padding and templates, and share the vocabulary, which nobody changes.
    """
    if key not in _kept:
        while len(_kept) >= MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = read()
    shared = getattr(_kept[key], "_tokenizer", None)
    return copy.deepcopy(_kept[key], {} if shared is None else {id(shared): shared})


def ensure_pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a loaded model's configuration the tokenizer's pad id if the configuration has no pad id.

    The end-of-text id is never set as the pad id, because transformers' classifiers read the last id that is not the
    pad id, and would skip an end of text that is also the pad id. `ensure_pad_id` must be called after the weights are
    loaded: a pad id in the configuration of a new model switches the gradient of the pad embedding off (padding_idx).
    """
    if pad_id_of(model.config) is None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None = None) -> None:
    """Give the tokenizer a pad token if it has none, without changing its vocabulary.

    The pad token is the pad token of the model's configuration; if the configuration names no pad token, the unknown
    token, unless the unknown token is the end of text; else the end-of-text token. The pad token is only a filler:
    masks are made from lengths, never from token ids.

    Raises:
        ModelError: The model's configuration names no pad token, and the tokenizer has no unknown and no end-of-text
            token.
    """
    if tokenizer.pad_token is not None:
        return
    configured = None if config is None else pad_id_of(config)
    if isinstance(configured, int) and 0 <= configured < len(tokenizer):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(configured)
    elif tokenizer.unk_token is not None and tokenizer.unk_token != tokenizer.eos_token:
        tokenizer.pad_token = tokenizer.unk_token
    elif tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    else:
        raise ModelError(
            f"{tokenizer.name_or_path}: the tokenizer has no pad, unknown or end-of-text token to pad with. Name one "
            "of its tokens as pad_token in its tokenizer_config.json."
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, where: str) -> None:
    """Raise `ModelError` if the tokenizer can produce an id that has no row in the model's embedding."""
    rows = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"{where}: the tokenizer has ids up to {largest}, the model's embedding has {rows} rows. Use the tokenizer "
            "that the model was trained with."
        )


def unused_ids(tokenizer: PreTrainedTokenizerBase, rows: int, used: Iterable[int] = ()) -> tuple[range, ...]:
    """Return the ids below `rows` that no token has, as ascending ranges; the ids in `used` count as tokens.

    Embeddings are often padded to a multiple of 64 or 128 rows: Qwen 2.5 has 151,936 rows for 151,665 tokens.
    """
    tokens = sorted({index for index in (*tokenizer.get_vocab().values(), *used) if index < rows})
    gaps = (range(before + 1, after) for before, after in pairwise([-1, *tokens, rows]))
    return tuple(gap for gap in gaps if gap)


def around_answer(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], then: Sequence[dict[str, Any]] = ()
) -> tuple[str, str] | None:
    """Return the text that the chat template writes before and after the content of an assistant's answer.

    `chat` holds the messages before the answer, and `then` the messages after the answer. Returns None if the tokenizer
    has no chat template, or if the chat template refuses the messages or does not write the answer unchanged.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [*chat, {"role": "assistant", "content": CONTENT_MARK}, *then]
    try:
        with name_slow_template(tokenizer):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a chat template may raise any error; the code that reads the chats reports the refused chat
        return None
    before, mark, after = text.rpartition(CONTENT_MARK)
    return (before, after) if mark else None


def name_slow_template(tokenizer: PreTrainedTokenizerBase) -> AbstractContextManager[None]:
    """Log the tokenizer's name if the `with` block takes long: a chat template is a program that may run for ever."""
    owner = tokenizer.name_or_path or "the tokenizer"
    return warn_if_slow(f"The chat template of {owner}", "It may have no end.", seconds=SLOW_TEMPLATE_S)


# The "+" in "+%}" makes Jinja keep a newline after the block
_DEFAULT = "{% if NAME is not defined %}{% set NAME = VALUE %}{% endif +%}"
# The tag {% generation %} exists only in transformers' Jinja, not in plain Jinja
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_CLOCK = re.compile(r"strftime_now\(\s*(?:(['\"])(.*?)\1\s*\))?")
_ONLY = "default"
_DEFAULTS = re.compile(r"(?:{% if \w+ is not defined %}{% set \w+ = .*? %}{% endif \+%})*", re.DOTALL)
_WRITTEN = re.compile(r"{% if \w+ is not defined %}{% set (\w+) = (.*?) %}{% endif \+%}", re.DOTALL)


def templates_of(tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name; a single template has the name `default`.

    The result is empty if the tokenizer has no chat template. If there are several templates, transformers uses
    `default`, and `tool_use` for chats with tools. `source` is the tokenizer's name in errors.

    Raises:
        ModelError: `chat_template` is neither a text nor a mapping from names to texts with the name `default`.
    """
    value = getattr(tokenizer, "chat_template", None) or {}
    templates = value if isinstance(value, Mapping) else {_ONLY: value}
    if templates and not (_ONLY in templates and all(isinstance(text, str) for text in templates.values())):
        what = f"templates named {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"{value!r:.60}"
        raise ModelError(
            f"{source or tokenizer.name_or_path or 'the tokenizer'}: chat_template holds {what}. Give one template as "
            f"text, or named texts with a `{_ONLY}`."
        )
    return dict(templates)


def printed_dates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the present time in each format with which the chat templates print it; [] if no template prints a time.

    A format that is not a literal text in the template is replaced by the full time with microseconds.
    """
    calls = [call for text in templates_of(tokenizer).values() for call in _CLOCK.finditer(text)]
    if not calls:
        return []
    formats = dict.fromkeys("%Y-%m-%d %H:%M:%S.%f" if call[2] is None else call[2] for call in calls)
    # Render strftime_now, which reads transformers' clock
    template = "\n".join(f"{{{{ strftime_now({format!r}) }}}}" for format in formats)
    question = [{"role": "user", "content": "?"}]
    return str(tokenizer.apply_chat_template(question, chat_template=template, tokenize=False)).split("\n")


def set_template_defaults(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], source: str) -> None:
    """Write default values of variables of the chat template, such as `enable_thinking`, at the template's beginning.

    Defaults in the chat template hold wherever a chat is rendered, also with the exported model. A caller that renders
    a chat may pass other values. If the tokenizer has several chat templates, each chat template gets the defaults of
    the variables that the template reads.

    Raises:
        ConfigError: No chat template reads one of the variables.
        ModelError: The tokenizer's `chat_template` is neither a text nor named texts with a `default`.
    """
    if not values:
        return
    texts = {template: without_template_defaults(text) for template, text in templates_of(tokenizer, source).items()}
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])
    variables = {
        template: meta.find_undeclared_variables(jinja.parse(_GENERATION.sub("", text)))
        for template, text in texts.items()
    }
    for name in values:
        if not any(name in names for names in variables.values()):
            raise ConfigError(f"chat_template_kwargs: the chat template of {source} does not read {name}; leave it out")
    # Python's repr of a plain value (text, number, Boolean, list) is also a Jinja literal.
    lines = {name: _DEFAULT.replace("NAME", name).replace("VALUE", repr(value)) for name, value in values.items()}
    templates = {
        template: "".join(line for name, line in lines.items() if name in variables[template]) + text
        for template, text in texts.items()
    }
    tokenizer.chat_template = templates if isinstance(tokenizer.chat_template, Mapping) else templates[_ONLY]


def template_defaults(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the values that `set_template_defaults` wrote at the beginning of a tokenizer's chat templates."""
    defaults: dict[str, Any] = {}
    for template in templates_of(tokenizer).values():
        written = template.removesuffix(without_template_defaults(template))
        defaults |= {name: ast.literal_eval(value) for name, value in _WRITTEN.findall(written)}
    return defaults


def without_template_defaults(template: str) -> str:
    """Return a chat template without the defaults that `set_template_defaults` wrote."""
    match = _DEFAULTS.match(template)
    return template[match.end() :] if match else template


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens: named tokens (end of text, padding …) and added tokens marked as special."""
    marked = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *marked])


def same_vocabulary(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Return whether both tokenizers give every token the same id."""
    vocabularies = [getattr(each, "_tokenizer", each) for each in (first, second)]
    return vocabularies[0] is vocabularies[1] or first.get_vocab() == second.get_vocab()


def append_end(ids: list[int], eos: int | None) -> list[int]:
    """Return token ids that end with the end-of-text id `eos`, added if it is missing; `eos` None: unchanged ids."""
    return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]


def encode_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, is_rendered: Sequence[bool] | None = None
) -> list[list[int]]:
    """Return the token ids of texts, with at most one beginning-of-text token, which the tokenizer may add.

    An end of text that the tokenizer appends is removed, because a text may be continued. An end of text that is
    written in the text stays. No token is added to a text that a chat template wrote: `is_rendered` is True for texts
    from a chat template; None: no text was rendered by a chat template.
    """
    begin, eos, end = tokenizer.bos_token, tokenizer.eos_token_id, str(tokenizer.eos_token)
    ids: list[list[int]] = [[] for _ in texts]
    whole = [bool(begin) and text.startswith(str(begin)) for text in texts]
    for row, rendered in enumerate(is_rendered or ()):
        whole[row] |= rendered
    for adds in (True, False):
        rows = [row for row in range(len(texts)) if whole[row] != adds]
        encoded = tokenizer([texts[row] for row in rows], add_special_tokens=adds)["input_ids"] if rows else []
        for row, tokens in zip(rows, encoded, strict=True):
            is_written = texts[row].endswith(end) and tokens[-2:-1] != [eos]
            ids[row] = list(tokens[:-1] if adds and tokens and tokens[-1] == eos and not is_written else tokens)
    return ids


def continuations(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[list[int]], ids: Sequence[list[int]]
) -> list[str]:
    """Return the texts of N token sequences `ids`, each as the continuation of its sequence in `before`.

    The result is the text of both sequences together, without the text of `before` and without special tokens. Many
    decoders (Llama's, or one that joins words) drop the space at the start of a text, so the text of `ids` alone would
    be joined to the text before it without a space. All texts of responses come from this function.
    """
    if not ids:  # for an empty list, some versions of transformers return one text instead of none
        return []
    both = [[*first, *then] for first, then in zip(before, ids, strict=True)]
    starts, wholes = (tokenizer.batch_decode(each, skip_special_tokens=True) for each in (list(before), both))
    # A multi-byte character whose first bytes are in `before` belongs to the text that completes the character.
    return [whole[shared_length(start, whole) :] for start, whole in zip(starts, wholes, strict=True)]


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts, in characters, or of two lists of tokens, in tokens."""
    if second[: len(first)] == first:
        return len(first)
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, len(second))


def drops_first_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer's decoding drops a space before the first token (see `continuations`)."""
    ids = list(tokenizer("a b", add_special_tokens=False)["input_ids"])
    return tokenizer.decode(ids) != "".join(tokenizer.batch_decode([ids[:-1], ids[-1:]]))


def with_first_space(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the same tokens whose decoded texts keep the first space that `tokenizer` drops.

    The result is for programs that decode responses alone and append them to their prompts. A tokenizer that drops no
    space, or has no decoder of the library `tokenizers`, is returned unchanged.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not drops_first_space(tokenizer):
        return tokenizer
    state = json.loads(backend.to_str())
    # Without a decoder, `tokenizers` joins tokens with spaces: add a decoder that inserts a space before the text.
    decoder = state["decoder"] or {"type": "Replace", "pattern": {"Regex": "^"}, "content": " "}
    for part in decoder.get("decoders", [decoder]):
        if part["type"] == "Strip":
            part["start"] = 0
        elif part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
    # Build a PreTrainedTokenizerFast, because the tokenizer's own class would build its own decoder again.
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps({**state, "decoder": decoder})),
        **tokenizer.special_tokens_map,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, context_ids: list[int], ids: list[int]) -> list[str]:
    """Return the text that each token adds to the text before the token; the joined texts are the text of `ids`.

    If a multi-byte character is split over several tokens, the last token gets the character and the other tokens "".
    Bytes that are not UTF-8 become U+FFFD. Special tokens are written out. `context_ids` are the tokens before `ids`,
    needed because many tokenizers drop the space at the start of a text.
    """

    def decode(start: int, end: int) -> str:
        return str(tokenizer.decode(sequence[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    sequence = [*context_ids[-_CONTEXT:], *ids]
    first = len(sequence) - len(ids)
    texts = [""] * len(ids)
    # The texts of tokens before `done` are known; decode from `start`, which gives enough context
    start, done = 0, first
    for end in range(first + 1, len(sequence) + 1):
        added = decode(start, end)[len(decode(start, done)) :]
        if not added.endswith(_INCOMPLETE) or end == len(sequence):
            texts[end - first - 1] = added
            start, done = done, end
    return texts


def train_word_tokenizer(texts: Iterable[str], context_length: int) -> PreTrainedTokenizerBase:
    """Train a word-level tokenizer: one id for each space-separated word, and <pad>, <unk> and </s>.

    decode(encode(text)) == text if the text's words are known and separated by single spaces. `context_length` becomes
    the tokenizer's `model_max_length`, in tokens.
    """
    backend = Tokenizer(WordLevel(unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    special = [PAD, UNKNOWN, END]
    # Remove special tokens from the texts, because the trainer would count them as words and give them a second id.
    words = (" ".join(word for word in text.split() if word not in special) for text in texts)
    backend.train_from_iterator(words, WordLevelTrainer(special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
