"""Tokenizers: a pad token for those without one, the ids that end a response, and one trained from scratch."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jinja2 import Environment, meta
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.capabilities import pad_id_of
from ppo_rlhf.runtime.processes import warn_if_slow

SLOW_TEMPLATE_S = 5.0
PAD, UNKNOWN, END = "<pad>", "<unk>", "</s>"
_INCOMPLETE = "\ufffd"
_CONTEXT = 8  # tokens
CONTENT_MARK = "⁂ANSWER⁂"  # stands for a message's content, to find what a template puts around it
_WORD_MARKS = "Ġ▁ "  # how byte-level BPE and SentencePiece write a leading space


def ensure_pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a loaded model's configuration the tokenizer's pad id if it has none, and that id ends no text.

    transformers' classifiers read the last id that is not pad: with the end of text as pad they would skip it. Call
    this after the weights are loaded: a pad id in the configuration of a new model switches that embedding's gradient
    off (padding_idx).
    """
    if pad_id_of(model.config) is None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None = None) -> None:
    """Give the tokenizer a pad token if it has none, without changing its vocabulary.

    The order is: the token that the model's configuration names, the unknown token if it does not end texts, the
    end-of-text token. The token is only a filler: masks are made from lengths and never read it.

    Raises:
        ModelError: The tokenizer has none of them.
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


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    *,
    stop_token: str = "eos",
    stop_token_id: int | None = None,
    vocabulary: int | None = None,
) -> tuple[int, ...]:
    """Return the ids that end a response, ascending.

    Args:
        tokenizer: The policy's.
        generation_config: Its `eos_token_id` may be one id or a list; all of them stop.
        stop_token: "eos" is the union of the generation configuration's ids, the tokenizer's end of text and the chat
            template's end of turn; "period" the ids of "."; "none" no id.
        stop_token_id: An explicit id, which replaces `stop_token`.
        vocabulary: Number of token ids of the model, see `ids_within`; None where it is not known.

    Raises:
        ConfigError: `stop_token_id` is not an id of the tokenizer, or `stop_token` is not one of the three.
        ModelError: The tokenizer has no such token.
    """
    if stop_token_id is not None:
        if not 0 <= stop_token_id < len(tokenizer):
            raise ConfigError(
                f"stop_token_id={stop_token_id} is not an id of the tokenizer (0 to {len(tokenizer) - 1})."
            )
        return (stop_token_id,)
    if stop_token == "none":
        return ()
    if stop_token == "period":
        ids = {index for token, index in tokenizer.get_vocab().items() if token.strip(_WORD_MARKS) == "."}
    elif stop_token == "eos":
        configured = generation_config.eos_token_id if generation_config is not None else None
        several = configured if isinstance(configured, list | tuple) else [configured]
        if not all(isinstance(index, int | None) for index in several):
            raise ModelError(f"generation_config.json: eos_token_id={configured!r} is neither a token id nor ids.")
        ids = {*several, tokenizer.eos_token_id, end_of_turn_id(tokenizer)} - {None}
    else:
        raise ConfigError(f"stop_token={stop_token!r} is not one of eos, period, none.")
    known = tuple(sorted(ids)) if vocabulary is None else ids_within(ids, vocabulary)
    if not known:
        raise ModelError(
            f"{tokenizer.name_or_path}: the tokenizer has no token for stop_token={stop_token}. "
            "Give stop_token_id, or stop_token: none to let every response run to its full length."
        )
    return known


def ids_within(ids: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """Return the stop ids below `vocabulary`, the model's number of token ids, ascending.

    Others are no error: a hand-made configuration keeps its architecture's end of text (GPT-2's 50256) beside a smaller
    vocabulary, and an id outside is an old way to switch the end of text off.
    """
    return tuple(sorted(index for index in ids if 0 <= index < vocabulary))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template closes an assistant's turn.

    None without a template, or with one that refuses a plain question and answer, or leaves the answer out.
    """
    found = around_answer(tokenizer, [{"role": "user", "content": "question"}])
    if found is None:
        return None
    ids, special = tokenizer.encode(found[1], add_special_tokens=False), special_ids(tokenizer)
    return next((index for index in ids if index in special), None)


def around_answer(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], then: Sequence[dict[str, Any]] = ()
) -> tuple[str, str] | None:
    """Return what the chat template writes before and after the content of an answer to a chat, with messages `then`.

    None without a template, or with one that refuses these messages, or does not write the content as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [*chat, {"role": "assistant", "content": CONTENT_MARK}, *then]
    try:
        with name_slow_template(tokenizer):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template may raise anything; the code that reads chats reports those it refuses
        return None
    before, found, after = text.rpartition(CONTENT_MARK)
    return (before, after) if found else None


def name_slow_template(tokenizer: PreTrainedTokenizerBase) -> AbstractContextManager[None]:
    """Log whose chat template is waited for if the block takes long: it is a program, and may not end."""
    owner = tokenizer.name_or_path or "the tokenizer"
    return warn_if_slow(f"The chat template of {owner}", "It may have no end.", seconds=SLOW_TEMPLATE_S)


_DEFAULT = "{% if NAME is not defined %}{% set NAME = VALUE %}{% endif +%}"  # + keeps a newline that follows
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # a tag that only transformers knows
_CLOCK = re.compile(r"strftime_now\(\s*(?:(['\"])(.*?)\1\s*\))?")
_ONLY = "default"
_DEFAULTS = re.compile(r"(?:{% if \w+ is not defined %}{% set \w+ = .*? %}{% endif \+%})*", re.DOTALL)
_WRITTEN = re.compile(r"{% if \w+ is not defined %}{% set (\w+) = (.*?) %}{% endif \+%}", re.DOTALL)


def templates_of(tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name: its only one is `default`. Without any there is none.

    Of several transformers takes `default`, and for chats with tools `tool_use`. `source` is its name in errors.

    Raises:
        ModelError: What it holds is neither a text nor named texts with a `default`.
    """
    held = getattr(tokenizer, "chat_template", None) or {}
    templates = held if isinstance(held, Mapping) else {_ONLY: held}
    if templates and not (_ONLY in templates and all(isinstance(text, str) for text in templates.values())):
        what = f"templates named {', '.join(map(str, held))}" if isinstance(held, Mapping) else f"{held!r:.60}"
        raise ModelError(
            f"{source or tokenizer.name_or_path or 'the tokenizer'}: chat_template holds {what}. Give one template as "
            f"text, or named texts with a `{_ONLY}`."
        )
    return dict(templates)


def printed_dates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what the chat templates print of the time, as of now: today's date in each of their formats; [] if none.

    A format that is not written out counts as the time to the microsecond.
    """
    calls = [call for text in templates_of(tokenizer).values() for call in _CLOCK.finditer(text)]
    if not calls:
        return []
    formats = dict.fromkeys("%Y-%m-%d %H:%M:%S.%f" if call[2] is None else call[2] for call in calls)
    template = "\n".join(f"{{{{ strftime_now({format!r}) }}}}" for format in formats)  # by the clock of transformers
    question = [{"role": "user", "content": "?"}]
    return str(tokenizer.apply_chat_template(question, chat_template=template, tokenize=False)).split("\n")


def set_template_defaults(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], source: str) -> None:
    """Write values for names that the chat template reads, such as `enable_thinking`, to the template's beginning.

    So they hold wherever a chat is rendered, also with the exported model; who renders may give others. Of several
    templates each gets those that it reads.

    Raises:
        ConfigError: No template reads a name.
        ModelError: As `templates_of`.
    """
    if not values:
        return
    held = {name: without_template_defaults(text) for name, text in templates_of(tokenizer, source).items()}
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])
    read = {name: meta.find_undeclared_variables(jinja.parse(_GENERATION.sub("", own))) for name, own in held.items()}
    for name in values:
        if not any(name in names for names in read.values()):
            raise ConfigError(f"chat_template_kwargs: the chat template of {source} does not read {name}; leave it out")
    # Python's literals of plain values are Jinja's, too
    lines = {name: _DEFAULT.replace("NAME", name).replace("VALUE", repr(value)) for name, value in values.items()}
    made = {
        template: "".join(line for name, line in lines.items() if name in read[template]) + own
        for template, own in held.items()
    }
    tokenizer.chat_template = made if isinstance(tokenizer.chat_template, Mapping) else made[_ONLY]


def template_defaults(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the values that `set_template_defaults` wrote to the beginning of a tokenizer's chat templates."""
    given: dict[str, Any] = {}
    for template in templates_of(tokenizer).values():
        written = template.removesuffix(without_template_defaults(template))
        given |= {name: ast.literal_eval(value) for name, value in _WRITTEN.findall(written)}
    return given


def without_template_defaults(template: str) -> str:
    """Return a chat template as it was before `set_template_defaults`."""
    found = _DEFAULTS.match(template)
    return template[found.end() :] if found else template


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens: the named ones (end of text, padding …) and added ones marked as special."""
    marked = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *marked])


def same_vocabulary(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Return whether both tokenizers give every token the same id."""
    return first is second or first.get_vocab() == second.get_vocab()


def append_end(ids: list[int], eos: int | None) -> list[int]:
    """Return the ids with one end of text after them."""
    return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]


def encode_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, is_rendered: Sequence[bool] | None = None
) -> list[list[int]]:
    """Return the tokens of texts, with the beginning that the tokenizer puts before them, but never a second one.

    An end of text that the tokenizer appends is taken off: not all texts end. One that a text has itself stays.
    `is_rendered` says which texts a chat template wrote, to which no token is added; None: it wrote none.
    """
    begin, eos, end = tokenizer.bos_token, tokenizer.eos_token_id, str(tokenizer.eos_token)
    ids: list[list[int]] = [[] for _ in texts]
    whole = [bool(begin) and text.startswith(str(begin)) for text in texts]
    for row, rendered in enumerate(is_rendered or ()):
        whole[row] |= rendered
    for adds in (True, False):
        rows = [row for row in range(len(texts)) if whole[row] != adds]
        found = tokenizer([texts[row] for row in rows], add_special_tokens=adds)["input_ids"] if rows else []
        for row, tokens in zip(rows, found, strict=True):
            own = texts[row].endswith(end) and tokens[-2:-1] != [eos]
            ids[row] = list(tokens[:-1] if adds and tokens and tokens[-1] == eos and not own else tokens)
    return ids


def continuations(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[list[int]], ids: Sequence[list[int]]
) -> list[str]:
    """Return what N token sequences say after those before them, without special tokens.

    It is the text of both together, less the text before. Many decoders (Llama's, or one that joins words) leave out
    the space at the start of a text, so the text of `ids` alone would be glued to the text before. All texts of
    responses come from here.
    """
    if not ids:  # of no texts some versions of transformers decode one
        return []
    both = [[*first, *then] for first, then in zip(before, ids, strict=True)]
    starts, wholes = (tokenizer.batch_decode(each, skip_special_tokens=True) for each in (list(before), both))
    # a character of several bytes may begin before, and belongs to what completes it
    return [whole[shared_length(start, whole) :] for start, whole in zip(starts, wholes, strict=True)]


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of characters with which both texts begin, or of tokens."""
    if second[: len(first)] == first:
        return len(first)
    differing = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, len(second))


def drops_first_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the text of tokens lacks the space that they have after other tokens (see `continuations`)."""
    ids = list(tokenizer("a b", add_special_tokens=False)["input_ids"])
    return tokenizer.decode(ids) != "".join(tokenizer.batch_decode([ids[:-1], ids[-1:]]))


def with_first_space(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose texts begin with the space that `tokenizer` drops; its tokens are the same.

    It is for programs that decode responses alone and put them after their prompts. One that drops nothing, or has no
    decoder of the library tokenizers, is returned as it is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not drops_first_space(tokenizer):
        return tokenizer
    state = json.loads(backend.to_str())
    decoder = state["decoder"] or {"type": "Replace", "pattern": {"Regex": "^"}, "content": " "}  # it joins words
    for part in decoder.get("decoders", [decoder]):
        if part["type"] == "Strip":
            part["start"] = 0
        elif part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
    # of no class of its own, which would make its decoder anew
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps({**state, "decoder": decoder})),
        **tokenizer.special_tokens_map,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, context_ids: list[int], ids: list[int]) -> list[str]:
    """Return the text that each token adds to the text before it; concatenated they are the text of `ids`.

    Where a character of several bytes is cut into tokens, the last of them has all of it and the others have "". Bytes
    that are no UTF-8 become U+FFFD. Special tokens are written out. `context_ids` are the tokens before `ids`: many
    tokenizers drop the space at the start of a text.
    """

    def decode(start: int, end: int) -> str:
        return str(tokenizer.decode(sequence[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    sequence = [*context_ids[-_CONTEXT:], *ids]
    first = len(sequence) - len(ids)
    texts = [""] * len(ids)
    start, done = 0, first  # the text of the tokens up to `done` is known; those from `start` are context enough
    for end in range(first + 1, len(sequence) + 1):
        added = decode(start, end)[len(decode(start, done)) :]
        if not added.endswith(_INCOMPLETE) or end == len(sequence):
            texts[end - first - 1] = added
            start, done = done, end
    return texts


def train_word_tokenizer(texts: Iterable[str], context_length: int) -> PreTrainedTokenizerBase:
    """Train a word-level tokenizer: one id for each space-separated word, and <pad>, <unk> and </s>.

    decode(encode(text)) == text for single-spaced known words. `context_length` becomes its `model_max_length`, tokens.
    """
    backend = Tokenizer(WordLevel(unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    special = [PAD, UNKNOWN, END]
    # a special token that stands in a text would be counted as a word, too, and get a second id
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
