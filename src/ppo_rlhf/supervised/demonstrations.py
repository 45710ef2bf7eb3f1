"""Check, split and tokenise tables of demonstrations for supervised fine-tuning.

Three of TRL's formats of demonstrations are supported: `text`; `prompt` and `completion`; `messages` (chats, which the
tokenizer's chat template renders).
"""

import copy
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import pandas as pd
from pydantic import Field
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ppo_rlhf.config.parameter_groups import Seed, parameter_group
from ppo_rlhf.core.errors import ConfigError, DataError, in_one_line
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.data.chats import (
    ASSISTANT,
    CONVERSATIONS,
    LEARNT,
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
from ppo_rlhf.data.repeated_prompts import split_chat, split_texts
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.tokenizers import append_end, encode_texts, shared_length, templates_of, without_template_defaults
from ppo_rlhf.runtime.log_lines import say_once

logger = logging.getLogger(__name__)

IGNORED = -100  # torch's cross entropy ignores tokens with this label
PARTS = ("training demonstrations", "held-out demonstrations")
"""Names, in messages, of the tables that `split_demonstrations` returns."""
_NO_MARKS = (
    "the chat template does not mark the assistant's turns ({% generation %}), and TRL has no training template for it"
)


@parameter_group("data_preparation")
class DataPreparationConfig:
    """Settings for reading demonstrations and for holding demonstrations out."""

    text_column: str = "text"
    """Column of whole texts, in tables without prompts."""
    prompt_column: str = "prompt"
    """Column of prompts, in tables of prompts and completions. SFT learns only the completions."""
    completion_column: str = "completion"
    """Column of completions, in the same tables."""
    messages_column: str = "messages"
    """Column of chats (docs/your_model.md). A chat is a list of `{"role": …, "content": …}` or of ShareGPT's messages,
    plain or as JSON. The tokenizer needs a chat template. If a table has no column of chats of this name, the column
    `conversations` is read."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the distinct demonstrations held out to evaluate the loss."""
    max_held_out: Annotated[int, Field(ge=1)] = 500
    """Largest number of held-out demonstrations."""
    max_demonstrations: Annotated[int, Field(ge=2)] | None = None
    """Demonstrations to use, drawn at random; None: all."""
    seed: Seed = 42
    """Seed of the random choice of the held-out demonstrations, and with max_demonstrations of the demonstrations to
    use."""


@dataclass(frozen=True)
class TokenisedDemonstrations:
    """N token sequences with their labels; `IGNORED` labels tokens that are not learnt."""

    input_ids: list[list[int]]
    labels: list[list[int]]

    @property
    def unlearnt(self) -> list[int]:
        """The rows without a token to learn; the first token of a row is not learnt, because no token precedes it."""
        return [row for row, labels in enumerate(self.labels) if all(label == IGNORED for label in labels[1:])]


def split_demonstrations(
    frame: pd.DataFrame, config: DataPreparationConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Check the table and return (training demonstrations, held-out demonstrations), as `read_demonstrations` does.

    No demonstration is both trained on and held out, and of several copies of a held-out demonstration only one copy is
    kept. With a tokenizer one chat of each kind is rendered as a check.

    Raises:
        DataError: The table cannot be read, fewer than two rows are distinct, or the chat template refuses a chat or
            leaves a part of a chat out.
    """
    table = read_demonstrations(frame, config)
    if tokenizer is not None and "messages" in table:
        records = enumerate(table.to_dict("records"))
        try_chats(((f"demonstrations: row {row}", *_chat_of(record)) for row, record in records), tokenizer)
    if config.max_demonstrations is not None:
        count = min(config.max_demonstrations, len(table))
        say_once(
            f"{count} of {len(table)} demonstrations are used (data_preparation.max_demonstrations).", logging.INFO
        )
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
    """Return the token sequences and labels of a table, as `encode_demonstrations` does, without rows that have no
    token to learn.

    Raises:
        DataError: As `encode_demonstrations`, or no row has a learnt token within `max_length`.
    """
    rows = encode_demonstrations(frame, tokenizer, max_length, name, template)
    unlearnt = {*rows.unlearnt}
    kept = [row for row in range(len(frame)) if row not in unlearnt]
    if unlearnt:
        logger.warning("%d %s have no token to learn and are left out", len(unlearnt), name)
    if not kept:
        raise DataError(
            f"{name}: none of {len(frame)} has a token to learn within {max_length} tokens. Raise "
            "supervised_finetuning.max_length if the model's context allows it, or give shorter demonstrations."
        )
    return TokenisedDemonstrations([rows.input_ids[row] for row in kept], [rows.labels[row] for row in kept])


def encode_demonstrations(
    frame: pd.DataFrame,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    name: str = "demonstrations",
    template: str | None = None,
) -> TokenisedDemonstrations:
    """Return the token sequences and labels of all rows of a table from `read_demonstrations`.

    An assistant's message with a key of `LEARNT` that is 0 or false is not learnt.

    Texts and completions end in the end-of-text token. SFT learns only the completions of tables with prompts. In chats
    without a prompt SFT learns only the assistant's turns if `template` marks the assistant's turns, and the whole chat
    otherwise. Texts are learnt whole. Sequences are truncated to `max_length` tokens; a truncated sequence has no
    end-of-text token. `name` names the table in messages; `template` is from `training_template`.

    Raises:
        DataError: The tokenizer has no chat template for chats, the chat template leaves a message out, a message is
            marked as not learnt but cannot be left out.
    """
    encoded = (
        _encode_chats(frame, tokenizer, template, name)
        if "messages" in frame.columns
        else _encode_texts(frame, tokenizer)
    )
    input_ids, labels, truncated = [], [], 0
    for ids, learnt in encoded:
        truncated += max_length is not None and len(ids) > max_length
        input_ids.append(ids[:max_length])
        labels.append(learnt[:max_length])
    if truncated:
        logger.warning("%d of %d %s are truncated to %d tokens", truncated, len(frame), name, max_length)
    return TokenisedDemonstrations(input_ids, labels)


def training_template(tokenizer: PreTrainedTokenizerBase, assistant_only: bool | None) -> str | None:
    """Return a chat template that marks the assistant's turns; None if chats are learnt whole.

    The returned template is the tokenizer's own chat template if it marks the assistant's turns, else TRL's training
    template for the tokenizer's chat template.

    Raises:
        ConfigError: `assistant_only` (`supervised_finetuning.assistant_only_loss`) is true, but no chat template that
            marks the assistant's turns exists.
    """
    if assistant_only is False or not getattr(tokenizer, "chat_template", None):
        return None
    from trl.chat_template_utils import get_training_chat_template

    template = templates_of(tokenizer)["default"]
    body = without_template_defaults(template)
    # TRL finds a training template by the exact text of a known template, so remove the default values that this
    # project prepends to the template
    with_body = copy.copy(tokenizer)
    with_body.chat_template = body
    try:
        return template.removesuffix(body) + (get_training_chat_template(with_body) or body)
    except ValueError as error:  # TRL has no training version of this chat template
        if assistant_only:
            raise ConfigError(
                f"supervised_finetuning.assistant_only_loss=true: {_NO_MARKS}. Set the setting to false to learn whole "
                "chats."
            ) from error
        return None


def describe_learnt(template: str | None, assistant_only: bool | None) -> str:
    """Return a line that says which parts of chats SFT learns, and why.

    `template` is what `training_template` returned for the setting `assistant_only`.
    """
    if template is not None:
        return "SFT learns only the assistant's turns of chats (supervised_finetuning.assistant_only_loss)."
    if assistant_only is False:
        return "SFT learns whole chats (supervised_finetuning.assistant_only_loss=false)."
    return (
        f"SFT learns whole chats, including the user's turns: {_NO_MARKS}. To learn only the assistant's turns, give "
        "the tokenizer a template that marks these turns, or give prompts and completions."
    )


def corpus_texts(frame: pd.DataFrame) -> Iterator[str]:
    """Yield the texts that a tokenizer can be trained on.

    Raises:
        DataError: The demonstrations are chats, which need an existing tokenizer with a chat template.
    """
    if "messages" in frame.columns:
        raise DataError("demonstrations: chats need a base model with a chat template. Set base_model_path.")
    yield from frame["text"] if "text" in frame.columns else frame["prompt"] + frame["completion"]


def read_demonstrations(
    frame: pd.DataFrame, config: DataPreparationConfig, name: str = "demonstrations"
) -> pd.DataFrame:
    """Return the rows of a user's table in standard columns; `name` names the table in messages.

    The columns are `messages`, or `prompt` and `completion`, or `text`, in this order of preference. If prompts and
    completions are chats, the columns are `messages` with the whole chat and `prompt` with the part of the chat that is
    not learnt. A column `tools` is kept. Chats are stored as JSON: Parquet would add the keys of one message to all
    messages, and has no type for some chats.

    Raises:
        DataError: The columns are missing, or a value is empty or not text.
    """
    formats = [
        {config.messages_column: "messages"},
        {CONVERSATIONS[1]: "messages"},
        {config.prompt_column: "prompt", config.completion_column: "completion"},
        {config.text_column: "text"},
    ]
    chosen = next((names for names in formats if all(name in frame.columns for name in names)), None)
    if chosen is None:
        raise DataError(
            f"{name}: the columns are {', '.join(map(str, frame.columns))}; needed is `{config.text_column}`, "
            f"or `{config.prompt_column}` and `{config.completion_column}`, or `{config.messages_column}`. Set "
            "data_preparation.text_column, prompt_column, completion_column or messages_column to your columns."
        )
    table = frame[list(chosen)].rename(columns=chosen).reset_index(drop=True)
    for given, standard in chosen.items():
        read = read_chat if standard == "messages" else read_text_or_chat
        table[standard] = [
            read(value, f"{name}: row {row}, column `{given}`") for row, value in enumerate(table[standard])
        ]
    # The first row of the table decides whether all its prompts and completions are chats or texts
    are_chats = not isinstance(table.iloc[0, -1], str)
    kind, expected = (list, "a chat") if are_chats else (str, "text")
    for given, standard in chosen.items():
        for row, value in enumerate(table[standard]):
            if not isinstance(value, kind) or (standard == "text" and are_chats):
                fix = (
                    "Set data_preparation.messages_column to this column"
                    if standard == "text"
                    else "Give only texts or only chats"
                )
                raise DataError(f"{name}: row {row}, column `{given}`: expected {expected}, got {value!r:.60}. {fix}")
    name_unused(name, frame.columns, chosen, of_chats=are_chats)
    if not are_chats:
        return _prompts_once(table, name) if "prompt" in table else table
    start = "prompt" if "prompt" in table else "messages"
    if SYSTEM in frame:
        pairs = enumerate(zip(table[start], frame[SYSTEM], strict=True))
        table[start] = [with_system(*pair, f"{name}: row {row}") for row, pair in pairs]
    if start == "prompt":
        for row, both in enumerate(zip(table["prompt"], table["completion"], strict=True)):
            table.at[row, "prompt"], table.at[row, "completion"] = split_chat(*both, f"{name}: row {row}")
        # No message of a prompt is learnt, so only the messages of completions keep the keys that say so
        table["prompt"] = [[_without_marks(message) for message in chat] for chat in table["prompt"]]
        table["messages"] = [join_chats(*both) for both in zip(table["prompt"], table["completion"], strict=True)]
        table = table[["messages", "prompt"]]
    _name_unused_marks(name, (message for chat in table["messages"] for message in chat))
    if TOOLS in frame:
        table[TOOLS] = [read_tools(value, f"{name}: row {row}") for row, value in enumerate(frame[TOOLS])]
    return table.map(as_json)


def _prompts_once(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a table of prompts and completions, in which completions do not repeat their prompts."""
    rows = [(row, prompt, (completion,)) for row, prompt, completion in table.itertuples(name=None)]
    fix = "set data_preparation.text_column to their column, and prompt_column to a name that no column has"
    for row, (prompt, completion) in split_texts(name, "completions begin", rows, fix).items():
        table.at[row, "prompt"], table.at[row, "completion"] = prompt, completion
    return table


def _without_marks(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in LEARNT}


def _name_unused_marks(name: str, messages: Iterable[dict[str, Any]]) -> None:
    """Log once each key of `LEARNT` that SFT does not follow: a part of a weight, or a weight of another role."""
    for message in messages:
        for key in LEARNT:
            value, role = message.get(key, 0), message["role"]
            if value not in (0, 1):
                say_once(f"{name}: `{key}` other than 0 and 1 is not used: such messages are learnt.")
            elif value and role != ASSISTANT:
                say_once(f"{name}: `{key}` of messages of the role `{role}` is not used.")
        if "train_detail" in message:
            say_once(f"{name}: `train_detail` is not used: messages are learnt whole.")


def _unlearnt(messages: Chat) -> list[bool]:
    """Return for each turn of the assistant whether a key of `LEARNT` says that SFT must not learn it."""
    turns = [message for message in messages if message["role"] == ASSISTANT]
    return [any(turn.get(key, 1) == 0 for key in LEARNT) for turn in turns]


def _chat_of(record: dict[str, str]) -> tuple[Chat, Tools]:
    """Return the messages and the tools of a row of a table from `read_demonstrations`."""
    return json.loads(record["messages"]), json.loads(record.get(TOOLS, "null"))


Encoded = Iterator[tuple[list[int], list[int]]]
"""Yields the tokens and the labels of each row."""


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
        if any(_unlearnt(messages)):
            whole = "completions" if "prompt" in record else "whole chats"
            raise DataError(
                f"{where}: a message has one of {', '.join(LEARNT)} with the value 0 or false, but SFT learns {whole} "
                "here. Give whole chats and a chat template that marks the assistant's turns, or remove the key."
            )
        ids, prompt = chat_ids(messages, tokenizer, where, tools=tools), []
        if "prompt" in record:
            prompt = chat_ids(json.loads(record["prompt"]), tokenizer, where, to_answer=True, tools=tools)
        yield ids, _without_prompt(ids, prompt)


def _without_prompt(ids: list[int], prompt: list[int]) -> list[int]:
    """Return the labels of `ids`: `IGNORED` for each token shared with the prompt, else the token itself.

    As in TRL, the tokens at the end of the prompt may merge with the completion; a merged token is learnt.
    """
    shared = shared_length(prompt, ids)
    return [IGNORED] * shared + ids[shared:]


def _marked(
    messages: Chat, tools: Tools, tokenizer: PreTrainedTokenizerBase, template: str, where: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and labels for the tokens of the assistant's turns only.

    Turns that must not be learnt have no labels: the n-th run of marked tokens is the n-th turn. A token is marked if
    one of its characters is. The mask of transformers' `apply_chat_template` marks all later tokens, too, if no token
    has the last marked character, such as a space that the tokenizer drops.
    """
    try:
        rendered: Any = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,  # type: ignore[arg-type]
        )
    except Exception as error:  # a chat template is a program, so rendering can raise any exception
        raise DataError(f"{where}: the chat template refuses a chat: {in_one_line(error)}") from error
    (text,), (parts,) = rendered
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    mask = [any(first < end and start < last for start, end in parts) for first, last in encoded["offset_mapping"]]
    check_shown(messages, tokenizer, where, str(tokenizer.decode(ids)), tools=tools)
    if any(unlearnt := _unlearnt(messages)):
        runs = [[*run] for is_marked, run in groupby(range(len(mask)), mask.__getitem__) if is_marked]
        if len(runs) != len(unlearnt):
            raise DataError(
                f"{where}: one of {', '.join(LEARNT)} says that a message is not learnt, but the chat template marks "
                f"{len(runs)} parts for {len(unlearnt)} turns of the assistant. Remove the key, or split the chat."
            )
        left_out = {token for run, is_unlearnt in zip(runs, unlearnt, strict=True) if is_unlearnt for token in run}
        mask = [learnt and token not in left_out for token, learnt in enumerate(mask)]
    return list(ids), [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
