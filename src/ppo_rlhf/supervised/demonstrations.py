"""Demonstrations: the tables that supervised fine-tuning learns from, checked, split, and turned into tokens.

Three of TRL's formats are read: `text`; `prompt` and `completion`; `messages` (a chat, by the tokenizer's template).
"""

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import ConfigError, DataError, in_one_line
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.data.chats import (
    CONVERSATIONS,
    SYSTEM,
    TOOLS,
    Chat,
    Tools,
    chat_ids,
    check_shown,
    join_chats,
    read_chat,
    read_text_or_chat,
    read_tools,
    try_chats,
    with_system,
)
from ppo_rlhf.data.columns import name_unused
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.tokenizers import append_end, encode_texts, shared_length, templates_of, without_template_defaults

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that torch's cross entropy leaves out
PARTS = ("training demonstrations", "held-out demonstrations")
_NO_MARKS = (
    "the chat template does not mark the assistant's turns ({% generation %}), and TRL has no training template for it"
)
"""Names of the tables that `split_demonstrations` returns, for messages."""


@settings_group("data_preparation")
class DataPreparationConfig:
    """How demonstrations are read, and how many are held out."""

    text_column: str = "text"
    """Column of whole texts."""
    prompt_column: str = "prompt"
    """Column of prompts, in tables of prompts and completions (texts, or chats); only completions are learnt."""
    completion_column: str = "completion"
    """Column of completions."""
    messages_column: str = "messages"
    """Column of chats, lists of `{"role": …, "content": …}`, or as ShareGPT has them, also as JSON; the tokenizer
    needs a chat template. Without this column, `conversations` is read."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the distinct demonstrations that are held out: the loss is evaluated on them."""
    max_held_out: Annotated[int, Field(ge=1)] = 500
    """Most demonstrations held out."""
    max_demonstrations: Annotated[int, Field(ge=2)] | None = None
    """Use this many, drawn at random; None uses all."""
    seed: Seed = 42
    """Chooses which demonstrations are held out."""


@dataclass(frozen=True)
class TokenisedDemonstrations:
    """N token sequences with their labels (`IGNORED` where nothing is learnt)."""

    input_ids: list[list[int]]
    labels: list[list[int]]


def split_demonstrations(
    frame: pd.DataFrame, config: DataPreparationConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Check the table and return (demonstrations to train on, demonstrations held out).

    Both have the columns `messages`, or `prompt` and `completion`, or `text`: the first that the table has. If prompts
    and completions are chats, `messages` has both, and `prompt` the part that is not learnt; a column `tools` of the
    table stays. Chats are JSON: Parquet would add the keys of one message to all, and has no type for some chats.
    Copies of one demonstration go to one side, and are held out once. With a tokenizer its chat template is tried.

    Raises:
        DataError: No such columns, a value that is empty or not text, fewer than two distinct rows, or a chat that the
            template does not take or show.
    """
    table = _standard_columns(frame, config)
    if tokenizer is not None and "messages" in table:
        records = enumerate(table.to_dict("records"))
        try_chats(((f"demonstrations: row {row}", *_chat_of(record)) for row, record in records), tokenizer)
    if config.max_demonstrations is not None:
        drawn = permutation(len(table), config.seed, "demonstrations")[: config.max_demonstrations].tolist()
        table = table.iloc[sorted(drawn)]
    keys, share, most = list(table.itertuples(index=False, name=None)), config.held_out_share, config.max_held_out
    rows = hold_out(keys, share, most, config.seed, "demonstrations", name="demonstrations")
    trained, held_out = (table.iloc[part].reset_index(drop=True) for part in rows)
    return trained, held_out


def tokenise_demonstrations(
    frame: pd.DataFrame,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    name: str = "demonstrations",
    template: str | None = None,
) -> TokenisedDemonstrations:
    """Return token sequences and labels of a table that `split_demonstrations` made.

    The end of text closes texts and completions. Where there are prompts, only completions are learnt; of chats the
    assistant's turns, if `template` marks them; else texts and chats are learnt whole. Longer sequences are cut at
    `max_length` tokens, and then have no end of text. `name` is the table's, for messages; `template` is from
    `training_template`.

    Raises:
        DataError: There are chats and no chat template, or one that leaves a message out; or nothing to learn within
            `max_length`.
    """
    encoded = (
        _encode_chats(frame, tokenizer, template, name)
        if "messages" in frame.columns
        else _encode_texts(frame, tokenizer)
    )
    input_ids, labels, truncated = [], [], 0
    for ids, learnt in encoded:
        truncated += max_length is not None and len(ids) > max_length
        ids, learnt = ids[:max_length], learnt[:max_length]
        if any(label != IGNORED for label in learnt[1:]):  # the first token has nothing to be predicted from
            input_ids.append(ids)
            labels.append(learnt)
    if truncated:
        logger.warning("%d of %d %s are cut at %d tokens", truncated, len(frame), name, max_length)
    if len(input_ids) < len(frame):
        logger.warning("%d %s have nothing to learn and are left out", len(frame) - len(input_ids), name)
    if not input_ids:
        raise DataError(
            f"{name}: none of {len(frame)} has a token to learn within {max_length} tokens. Raise "
            "supervised_finetuning.max_length if the model's context allows it, or give shorter demonstrations."
        )
    return TokenisedDemonstrations(input_ids, labels)


def training_template(tokenizer: PreTrainedTokenizerBase, assistant_only: bool | None) -> str | None:
    """Return a chat template that marks the assistant's turns, None if chats are learnt whole.

    It is the tokenizer's own if that has marks, or else the one that TRL has for it.

    Raises:
        ConfigError: `assistant_only` (`supervised_finetuning.assistant_only_loss`) is true, and there are no marks.
    """
    if assistant_only is False or not getattr(tokenizer, "chat_template", None):
        return None
    from trl.chat_template_utils import get_training_chat_template  # heavy: only chats pay for it

    whole = templates_of(tokenizer)["default"]
    own = without_template_defaults(whole)
    known = copy.copy(tokenizer)  # TRL knows templates by their text
    known.chat_template = own
    try:
        return whole.removesuffix(own) + (get_training_chat_template(known) or own)
    except ValueError as error:  # TRL has none for this template
        if assistant_only:
            raise ConfigError(
                f"supervised_finetuning.assistant_only_loss=true: {_NO_MARKS}. Set it to false to learn whole chats."
            ) from error
        return None


def describe_learnt(template: str | None, assistant_only: bool | None) -> str:
    """Return in a line what is learnt of chats, given what `training_template` returned for a setting, and why."""
    if template is not None:
        return "Of chats only the assistant's turns are learnt (supervised_finetuning.assistant_only_loss)."
    if assistant_only is False:
        return "Whole chats are learnt (supervised_finetuning.assistant_only_loss=false)."
    return (
        f"Whole chats are learnt, the user's turns too: {_NO_MARKS}. To learn only the assistant's, give the tokenizer "
        "a template that marks them, or give prompts and completions."
    )


def corpus_texts(frame: pd.DataFrame) -> Iterator[str]:
    """Yield the texts that a tokenizer can be trained on.

    Raises:
        DataError: The demonstrations are chats, which need a tokenizer with a chat template.
    """
    if "messages" in frame.columns:
        raise DataError("demonstrations: chats need a model with a chat template. Set base_model_path.")
    yield from frame["text"] if "text" in frame.columns else frame["prompt"] + frame["completion"]


def _standard_columns(frame: pd.DataFrame, config: DataPreparationConfig) -> pd.DataFrame:
    formats = [
        {config.messages_column: "messages"},
        {CONVERSATIONS[1]: "messages"},
        {config.prompt_column: "prompt", config.completion_column: "completion"},
        {config.text_column: "text"},
    ]
    chosen = next((names for names in formats if all(name in frame.columns for name in names)), None)
    if chosen is None:
        raise DataError(
            f"demonstrations: the columns are {', '.join(map(str, frame.columns))}; needed is `{config.text_column}`, "
            f"or `{config.prompt_column}` and `{config.completion_column}`, or `{config.messages_column}`. Name yours "
            "in data_preparation.text_column and its siblings."
        )
    table = frame[list(chosen)].rename(columns=chosen).reset_index(drop=True)
    for given, standard in chosen.items():
        read = read_chat if standard == "messages" else read_text_or_chat
        table[standard] = [
            read(value, f"demonstrations: row {row}, column `{given}`") for row, value in enumerate(table[standard])
        ]
    # of prompts and completions the first row decides
    are_chats = not isinstance(table.iloc[0, -1], str)
    kind, wanted = (list, "a chat") if are_chats else (str, "text")
    for given, standard in chosen.items():
        for row, value in enumerate(table[standard]):
            if not isinstance(value, kind) or (standard == "text" and are_chats):
                fix = "Name it in data_preparation.messages_column" if standard == "text" else "Give one kind"
                raise DataError(
                    f"demonstrations: row {row}, column `{given}`: expected {wanted}, got {value!r:.60}. {fix}"
                )
    name_unused("demonstrations", frame.columns, chosen, of_chats=are_chats)
    if not are_chats:
        return table
    start = "prompt" if "prompt" in table else "messages"
    if SYSTEM in frame:
        pairs = enumerate(zip(table[start], frame[SYSTEM], strict=True))
        table[start] = [with_system(*pair, f"demonstrations: row {row}") for row, pair in pairs]
    if start == "prompt":
        table["messages"] = [join_chats(*both) for both in zip(table["prompt"], table["completion"], strict=True)]
        table = table[["messages", "prompt"]]
    if TOOLS in frame:
        table[TOOLS] = [read_tools(value, f"demonstrations: row {row}") for row, value in enumerate(frame[TOOLS])]
    return table.map(as_json)


def _chat_of(record: dict[str, str]) -> tuple[Chat, Tools]:
    """Return the messages and the tools of a row of a standard table of chats."""
    return json.loads(record["messages"]), json.loads(record.get(TOOLS, "null"))


Encoded = Iterator[tuple[list[int], list[int]]]
"""The tokens and the labels of each row."""


def _encode_texts(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    prompts = [""] * len(frame) if "text" in frame.columns else frame["prompt"].tolist()
    wholes = encode_texts(list(corpus_texts(frame)), tokenizer)
    for prompt, whole in zip(encode_texts(prompts, tokenizer), wholes, strict=True):
        closed = append_end(whole, tokenizer.eos_token_id)
        yield closed, _without_prompt(closed, prompt)


def _encode_chats(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase, template: str | None, name: str) -> Encoded:
    for row, record in enumerate(frame.to_dict("records")):
        (messages, tools), where = _chat_of(record), f"{name}: row {row}"
        if template is not None and "prompt" not in record:
            yield _marked(messages, tools, tokenizer, template, where)
            continue
        ids, prompt = chat_ids(messages, tokenizer, where, tools=tools), []
        if "prompt" in record:
            prompt = chat_ids(json.loads(record["prompt"]), tokenizer, where, to_answer=True, tools=tools)
        yield ids, _without_prompt(ids, prompt)


def _without_prompt(ids: list[int], prompt: list[int]) -> list[int]:
    """Return tokens as labels, from where they differ from the prompt's: they may merge across its end, as in TRL."""
    shared = shared_length(prompt, ids)
    return [IGNORED] * shared + ids[shared:]


def _marked(
    messages: Chat, tools: Tools, tokenizer: PreTrainedTokenizerBase, template: str, where: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and as labels those of the assistant's turns."""
    try:
        found: Any = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:  # a template is a program: it can raise anything
        raise DataError(f"{where}: the chat template refuses a chat: {in_one_line(error)}") from error
    ids, mask = found["input_ids"], found["assistant_masks"]
    check_shown(messages, tokenizer, where, str(tokenizer.decode(ids)), tools=tools)
    return list(ids), [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
