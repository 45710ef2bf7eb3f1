"""Prompts: checked, tokenised, and split into training and held-out prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import (
    ASSISTANT,
    CONVERSATIONS,
    SHOWN_IN_CHATS,
    SYSTEM,
    TOOLS,
    Chat,
    Tools,
    read_text_or_chat,
    read_tools,
    render_chat,
    with_system,
)
from ppo_rlhf.data.columns import name_unshown
from ppo_rlhf.data.prompt_dataset import PROMPT_COLUMNS, PromptDataset, arrow_column, as_json
from ppo_rlhf.data.sources import LONG, bars
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.context import usable_context
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import encode_texts, printed_dates
from ppo_rlhf.runtime import processes

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_VERSION = 2  # of the tokenised table: raise it when `_tokenise` gives other results


@settings_group("prompts")
class PromptsConfig:
    """How prompts are read from their table, and how many are held out for evaluation."""

    column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (`[{"role": …, "content": …}, …]`). An assistant's
    message at the end is continued. Content may be a list of parts of text, and may be missing beside a tool call.
    Without this column, `messages` or `conversations` is read, whole conversations whose last reply is dropped.
    Messages may be JSON."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the prompts held out for evaluation when no evaluation prompts are given; never trained on."""
    max_held_out: Annotated[int, Field(ge=1)] = 512
    """Most prompts held out, and most evaluation prompts used."""
    seed: Seed = 42
    """Chooses which prompts are held out."""
    train_on_evaluation_prompts: bool = False
    """Train on prompts of evaluation_prompts_path, too, if prompts_path has them: for tasks whose prompts are all there
    is. Else they are left out of training."""


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts as PPO takes them: tokenised, each with room for a response."""

    tokenizer: PreTrainedTokenizerBase  # the policy's
    context: int | None  # most tokens of a prompt with its response; None: no limit
    response_length: int  # tokens that must fit after each prompt
    overlong: Literal["error", "drop", "truncate_left"]  # what to do with prompts longer than the room for them
    why: str = ""  # ends errors: why the context is less than the model reads (`usable_context`)

    @classmethod
    def of(cls, policy: PretrainedHandle, ppo: PPOConfig) -> PromptReader:
        """Return what reads the prompts of a stored policy."""
        context, why = usable_context(policy.config())
        return cls(policy.tokenizer(), context, ppo.response_length, ppo.overlong_prompts, why)

    def read(self, table: Dataset, column: str, name: str) -> PromptDataset:
        """Return the tokenised prompts of a table, as `tokenise` and `fit` do it."""
        return PromptDataset.of_table(self.fit(self.tokenise(table, column, name), name))

    def tokenise(self, table: Dataset, column: str, name: str) -> Dataset:
        """Return a table with the prompts as text (`prompt`) and as tokens (`prompt_ids`), and the columns given.

        A prompt that is a chat is also there as JSON of its messages (`prompt_chat`).

        Text is tokenised as the tokenizer does by default (with a BOS if it adds one and the text has none); chat
        messages go through its chat template with the generation prompt and the row's `tools` and `system`, and the
        assistant's last message is continued.
        Of a column `messages` or `conversations`, which is read if there is no `column`, the last reply is dropped.
        `name` says in errors where the table comes from.

        It is done once: `datasets` keeps the result on disk, where the next call and other processes find it. If the
        chat template prints the date, a result is that of its day.

        Raises:
            DataError: The column is missing, another one has a name of these columns, a row is not text or
                messages, or there is no row.
        """
        from datasets import Features, List, Value

        if not len(table):
            raise DataError(f"{name}: there is no prompt")
        used = _prompt_column(table, column, name)
        for taken in PROMPT_COLUMNS:
            if taken in table.column_names and not taken == used == "prompt":
                raise DataError(
                    f"{name}: a column is called `{taken}`, a name that the table of tokenised prompts uses itself. "
                    "Rename it, or remove it."
                )

        beside = _shown_beside(table, used)
        text, number = Value("string"), Value("int32")
        kinds = {"prompt": text, "prompt_ids": List(number), "prompt_chat": text, "prompt_length": number}

        dates = processes.from_main(printed_dates(self.tokenizer))

        def tokenised() -> Dataset:
            with bars(len(table) > LONG):
                return table.map(
                    _tokenise,
                    batched=True,
                    input_columns=[used, *beside],
                    with_indices=True,
                    features=Features({**table.features, **kinds}),
                    fn_kwargs={
                        "tokenizer": self.tokenizer,
                        "column": used,
                        "beside": beside,
                        "version": _VERSION,
                        "dates": dates,
                    },
                    desc="Tokenising prompts",
                )

        try:
            found = processes.after_main(tokenised)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        of_chats = not arrow_column(found, "prompt_chat").null_count
        name_unshown(table.column_names, used, of_chats=of_chats)
        return found

    def fit(self, table: Dataset, name: str) -> Dataset:
        """Return the prompts that leave room for a response, after `overlong` is done to the others.

        Raises:
            DataError: A prompt is too long and `overlong` is `error`, or all are too long and it is `drop`.
        """
        context, response_length, overlong, why = self.context, self.response_length, self.overlong, self.why
        if context is None:
            return table
        room = context - response_length
        if room < 1:
            raise DataError(
                f"ppo.response_length={response_length} leaves no room for a prompt in the model's context of "
                f"{context} tokens; set it to at most {context - 1}{why}"
            )
        lengths = arrow_column(table, "prompt_length").to_numpy()
        fits = np.flatnonzero(lengths <= room)
        if len(fits) == len(table):
            return table
        limit = f"{room} tokens, the model's context of {context} less ppo.response_length={response_length}"
        if overlong == "error":
            raise DataError(
                f"{name}: {len(table) - len(fits)} of {len(table)} prompts (the first in row "
                f"{np.argmax(lengths > room)}) are longer than {limit}; the longest has {lengths.max()}. "
                f"Set ppo.overlong_prompts to drop or truncate_left, or shorten the responses{why}"
            )
        if overlong == "truncate_left":
            begin = {"room": room, "bos": self.tokenizer.bos_token_id}
            with bars(len(table) > LONG):
                return table.map(_truncate_left, input_columns=["prompt_ids"], fn_kwargs=begin, desc="Cutting prompts")
        if not len(fits):
            raise DataError(
                f"{name}: none of {len(table)} has at most {limit}, and ppo.overlong_prompts=drop leaves longer ones "
                f"out. Set it to truncate_left, shorten the responses, or give shorter prompts{why}"
            )
        return table.select(fits)

    def read_split(
        self, table: Dataset, evaluation: Dataset | None, settings: PromptsConfig
    ) -> tuple[PromptDataset, PromptDataset]:
        """Return (prompts to train on, prompts held out), tokenised; the rows are those of `split_held_out`."""
        trained, held_out = split_held_out(table, evaluation, settings)
        for given in filter(None, (table, evaluation)):
            if (used := _prompt_column(given, settings.column, "prompts")) in CONVERSATIONS:
                logger.info("Of %d conversations in the column %s the last reply is left out.", len(given), used)
        whole = self.tokenise(table, settings.column, "prompts")
        other = whole
        if evaluation is not None:
            other = self.tokenise(evaluation, settings.column, "evaluation prompts")
        parts = (whole.select(trained), "training prompts"), (other.select(held_out), "evaluation prompts")
        training, held = (PromptDataset.of_table(self.fit(part, name)) for part, name in parts)
        return training, held.select(range(len(held)))


def split_held_out(table: Dataset, evaluation: Dataset | None, settings: PromptsConfig) -> tuple[list[int], list[int]]:
    """Return (rows of the prompts to train on, rows held out: of the evaluation table if there is one).

    Held-out prompts are a seeded share of the distinct prompts, at most `max_held_out`; copies of one prompt go to one
    side. With an evaluation table its first `max_held_out` rows are held out, and the prompts that it does not have are
    trained on; with `train_on_evaluation_prompts` all are.

    Raises:
        DataError: The column is missing, there are fewer than two distinct prompts to split, or none to train on.
    """
    maximum = settings.max_held_out
    if evaluation is not None:
        rows = list(range(len(table)))
        if not settings.train_on_evaluation_prompts:
            are_evaluated = find_evaluated(table, evaluation, settings.column)
            rows = [row for row in rows if not are_evaluated[row]]
            if not rows:
                raise DataError(
                    "prompts: evaluation_prompts_path has all of them, so none is left to train on. Give others, or "
                    "set prompts.train_on_evaluation_prompts=true to train on them"
                )
        return rows, list(range(min(maximum, len(evaluation))))
    keys, share = _keys(table, settings.column, "prompts"), settings.held_out_share
    advice = "Give more prompts, or evaluation_prompts_path."
    return hold_out(keys, share, maximum, settings.seed, "held_out", name="prompts", advice=advice)


def find_evaluated(table: Dataset, evaluation: Dataset, column: str) -> list[bool]:
    """Return for each row of a table of prompts whether its prompt is one of the evaluation prompts."""
    evaluated = set(_keys(evaluation, column, "evaluation prompts"))
    return [key in evaluated for key in _keys(table, column, "prompts")]


def _prompt_column(table: Dataset, column: str, name: str) -> str:
    """Return the column to read: a chat's if the one that is set is missing."""
    found = next((each for each in (column, *CONVERSATIONS) if each in table.column_names), None)
    if found is None:
        raise DataError(
            f"{name}: no column `{column}` (prompts.column); the columns are {', '.join(table.column_names)}"
        )
    return found


def _keys(table: Dataset, column: str, name: str) -> list[int]:
    """Return a key of each prompt, the same for copies: its hash, because many texts would fill the memory.

    A chat's key has what is rendered with it, the system message and the tools.
    """
    used = _prompt_column(table, column, name)
    columns = [used, *_shown_beside(table, used)]
    keys: list[int] = []
    for batch in table.select_columns(columns).iter(batch_size=1_000):
        for cells in zip(*(batch[each] for each in columns), strict=True):
            row = f"{name}: row {len(keys)}"
            prompt, tools = _read_whole(cells[0], dict(zip(columns, cells, strict=True)), row, used)
            keys.append(hash(prompt if isinstance(prompt, str) else prompt_key(prompt, tools)))
    return keys


def prompt_key(chat: Chat, tools: Tools) -> str:
    """Return what is the same for copies of a chat with its tools, whatever the order of the keys."""
    return as_json([chat, tools], sort_keys=True)


def _shown_beside(table: Dataset, used: str) -> list[str]:
    """Return the columns with which a table's chats in the column `used` are rendered."""
    return [name for name in SHOWN_IN_CHATS if name in table.column_names and name != used]


def _tokenise(
    values: list[Any],
    *others: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    beside: list[str],
    version: int,
    dates: list[str],
) -> dict[str, Any]:
    """Return the columns `PROMPT_COLUMNS` of some rows; `others` are the columns `beside` and the numbers of the rows.

    `version` and `dates` only tell results of other code and of other days apart.
    """
    *columns, rows = others
    prompts, texts = [], []
    for value, row, *cells in zip(values, rows, *columns, strict=True):
        prompt, tools = _read_whole(value, dict(zip(beside, cells, strict=True)), f"row {row}", column)
        if not isinstance(prompt, str):
            where = f"row {row}, column `{column}`"
            texts.append(render_chat(prompt, tokenizer, where, to_answer=True, tools=tools))
        else:
            texts.append(prompt)
        prompts.append(prompt)
    chats = [None if isinstance(prompt, str) else as_json(prompt) for prompt in prompts]
    ids = encode_texts(texts, tokenizer, [chat is not None for chat in chats])
    if [] in ids:
        raise DataError(f"row {rows[ids.index([])]}, column `{column}`: the prompt has no tokens")
    return {"prompt": texts, "prompt_ids": ids, "prompt_chat": chats, "prompt_length": [len(each) for each in ids]}


def _read_whole(value: Any, cells: dict[str, Any], row: str, column: str) -> tuple[str | Chat, Tools]:
    """Return a row's prompt with the system message of its cells, and its tools; text has neither."""
    prompt = _read(value, f"{row}, column `{column}`", column)
    if isinstance(prompt, str):
        return prompt, None
    return with_system(prompt, cells.get(SYSTEM), f"{row}, column `{column}`"), read_tools(cells.get(TOOLS), row)


def _read(value: Any, where: str, column: str) -> str | Chat:
    """Return a prompt: text or a chat, of whole conversations without the last reply."""
    prompt = read_text_or_chat(value, where)
    if column not in CONVERSATIONS or isinstance(prompt, str) or prompt[-1]["role"] != ASSISTANT:
        return prompt
    if len(prompt) == 1:
        raise DataError(f"{where}: before its only message, which is the assistant's, there is no prompt")
    return prompt[:-1]


def _truncate_left(prompt_ids: list[int], *, room: int, bos: int | None) -> dict[str, Any]:
    """Cut off the beginning of a prompt, but keep its BOS: models have not seen texts without it."""
    kept = prompt_ids[-room:]
    if len(prompt_ids) > room >= 2 and prompt_ids[0] == bos:
        kept = [prompt_ids[0], *kept[1:]]
    return {"prompt_ids": kept, "prompt_length": len(kept)}
