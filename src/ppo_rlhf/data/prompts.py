"""Check and tokenise prompts, and split them into training and held-out prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, assert_never

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import Seed, parameter_group
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
from ppo_rlhf.data.plain_texts import name_plain_texts
from ppo_rlhf.data.prompt_dataset import PROMPT_COLUMNS, PromptDataset, arrow_column, as_json
from ppo_rlhf.data.sources import LONG, bars
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.context_length import usable_context
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import encode_texts, printed_dates
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.log_lines import say_once

if TYPE_CHECKING:
    from datasets import Dataset

# Version of the cached tokenised table: increase it when `_tokenise` returns different rows for the same prompts
_VERSION = 2


@parameter_group("prompts")
class PromptsConfig:
    """Settings for reading prompts from a table and for holding prompts out for evaluation."""

    column: str = "prompt"
    """Column with the prompts: text, or chat messages (docs/your_model.md). Messages are a list `[{"role": …,
    "content": …}, …]`, plain or as JSON. If a prompt ends with an assistant's message, the policy continues the
    message. The content of a message may be a list of text parts, and may be missing beside a tool call. A table
    without this column may have whole conversations in the column `messages` or `conversations`; the last reply of each
    conversation is dropped."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the prompts held out if no evaluation prompts are given. PPO never trains on held-out prompts."""
    max_held_out: Annotated[int, Field(ge=1)] = 512
    """Largest number of held-out or evaluation prompts."""
    seed: Seed = 42
    """Seed of the random choice of the held-out prompts."""
    train_on_evaluation_prompts: bool = False
    """Train also on the prompts of prompts_path that occur in evaluation_prompts_path. By default prompts that occur in
    both tables are left out of training. Set true for a task that has no prompts beyond those of prompts_path."""


@dataclass(frozen=True)
class PromptReader:
    """Tokenises prompts and makes sure that each prompt leaves room for a response."""

    tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer, which encodes the prompts
    context: int | None  # maximum number of tokens of a prompt with its response; None: no limit
    response_length: int  # number of tokens that must fit into the context after each prompt
    overlong: Literal["error", "drop", "truncate_left"]  # what to do with a prompt that leaves no room for a response
    # End of error messages: the reason why the usable context is shorter than the model's context (see
    # `usable_context`)
    why: str = ""
    are_plain: bool = False  # the user asked for plain texts, so that no line warns of them

    @classmethod
    def of(cls, policy: PretrainedHandle, ppo: PPOConfig) -> PromptReader:
        """Return the reader for a stored policy's tokenizer and context and for the settings of PPO."""
        context, why = usable_context(policy.config())
        return cls(policy.tokenizer(), context, ppo.response_length, ppo.overlong_prompts, why)

    def read(self, table: Dataset, column: str, name: str) -> PromptDataset:
        """Return the prompts of a table after the methods `tokenise` and `fit`."""
        return PromptDataset.of_table(self.fit(self.tokenise(table, column, name), name))

    def tokenise(self, table: Dataset, column: str, name: str) -> Dataset:
        """Return the table with `PROMPT_COLUMNS` added.

        `prompt` is the prompt's text, `prompt_ids` its token ids, `prompt_length` its number of tokens, and
        `prompt_chat` the messages of a chat prompt as JSON, None for plain text.

        Plain text is tokenised with the tokenizer's defaults; a BOS that the text already has is not added again. The
        chat template renders chat messages with the row's `tools` and `system` and with the generation prompt. A chat
        that ends with an assistant's message is rendered without the generation prompt, because the policy continues
        the message. If `column` is missing, whole conversations are read from `messages` or `conversations`, and the
        last reply of each conversation is dropped. `name` names the table in errors.

        `datasets` caches the tokenised table on disk for later calls and other processes. If the chat template prints
        the date, a cached table is used only on the same day.

        Raises:
            DataError: The table is empty, `column` is missing, another column has a name of `PROMPT_COLUMNS`, or a row
                is neither text nor messages.
        """
        from datasets import Features, List, Value

        if not len(table):
            raise DataError(f"{name}: the table has no prompts")
        used = _prompt_column(table, column, name)
        for reserved in PROMPT_COLUMNS:
            if reserved in table.column_names and not reserved == used == "prompt":
                raise DataError(
                    f"{name}: a column is called `{reserved}`, a name that is reserved for the table of tokenised "
                    "prompts. Rename or remove the column."
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
            prompts = processes.after_main(tokenised)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        of_chats = not arrow_column(prompts, "prompt_chat").null_count
        if not of_chats:
            rows = prompts.select_columns(["prompt", "prompt_chat"])
            plain = (row["prompt"] for row in rows if row["prompt_chat"] is None)
            name_plain_texts("prompts", plain, self.tokenizer, are_usual=self.are_plain)
        name_unshown(table.column_names, used, of_chats=of_chats)
        return prompts

    def fit(self, table: Dataset, name: str) -> Dataset:
        """Return a table whose prompts all leave room for a response; `overlong` decides about prompts that are too
        long.

        Raises:
            DataError: A prompt is too long and `overlong` is `error`, or all prompts are too long and `overlong` is
                `drop`, or the response length leaves no room for any prompt.
        """
        context, response_length, overlong, why = self.context, self.response_length, self.overlong, self.why
        if context is None:
            return table
        room = context - response_length
        if room < 1:
            raise DataError(
                f"ppo.response_length={response_length} leaves no room for a prompt in the model's context of "
                f"{context} tokens; set ppo.response_length to at most {context - 1}{why}"
            )
        lengths = arrow_column(table, "prompt_length").to_numpy()
        fits = np.flatnonzero(lengths <= room)
        if len(fits) == len(table):
            return table
        limit = f"{room} tokens, the model's context of {context} less ppo.response_length={response_length}"
        match overlong:
            case "error":
                raise DataError(
                    f"{name}: {len(table) - len(fits)} of {len(table)} prompts (the first in row "
                    f"{np.argmax(lengths > room)}) are longer than {limit}; the longest has {lengths.max()}. "
                    f"Set ppo.overlong_prompts to drop or truncate_left, or reduce ppo.response_length{why}"
                )
            case "truncate_left":
                say_once(
                    f"{name}: {len(table) - len(fits)} of {len(table)} are longer than {limit}, and lose their "
                    "beginning (ppo.overlong_prompts=truncate_left)."
                )
                options = {"room": room, "bos": self.tokenizer.bos_token_id}
                with bars(len(table) > LONG):
                    return table.map(
                        _truncate_left, input_columns=["prompt_ids"], fn_kwargs=options, desc="Truncating prompts"
                    )
            case "drop":
                if not len(fits):
                    raise DataError(
                        f"{name}: none of {len(table)} prompts has at most {limit}, and ppo.overlong_prompts=drop "
                        f"removes longer prompts. Set ppo.overlong_prompts to truncate_left, reduce "
                        f"ppo.response_length, or give shorter prompts{why}"
                    )
                say_once(
                    f"{name}: {len(table) - len(fits)} of {len(table)} are longer than {limit}, and are left out "
                    "(ppo.overlong_prompts=drop)."
                )
                return table.select(fits)
            case unknown:
                assert_never(unknown)

    def read_split(
        self, table: Dataset, evaluation: Dataset | None, settings: PromptsConfig
    ) -> tuple[PromptDataset, PromptDataset]:
        """Return (training prompts, held-out prompts), tokenised; `split_held_out` chooses the rows."""
        trained, held_out = split_held_out(table, evaluation, settings)
        for part in filter(None, (table, evaluation)):
            if (used := _prompt_column(part, settings.column, "prompts")) in CONVERSATIONS:
                say_once(
                    f"Of {len(part)} conversations in the column {used}, those that end with a reply lose it.",
                    logging.INFO,
                )
        tokenised = self.tokenise(table, settings.column, "prompts")
        evaluated = tokenised
        if evaluation is not None:
            evaluated = self.tokenise(evaluation, settings.column, "evaluation prompts")
        if self.overlong == "error":  # before the split, so that errors have the row numbers of the user's tables
            self.fit(tokenised, "prompts")
            self.fit(evaluated, "prompts" if evaluation is None else "evaluation prompts")
        parts = (tokenised.select(trained), "training prompts"), (evaluated.select(held_out), "evaluation prompts")
        training, held = (PromptDataset.of_table(self.fit(part, name)) for part, name in parts)
        return training, held.select(range(len(held)))


def split_held_out(table: Dataset, evaluation: Dataset | None, settings: PromptsConfig) -> tuple[list[int], list[int]]:
    """Return (training rows of `table`, held-out rows of `evaluation`, or of `table` if `evaluation` is None).

    Without an evaluation table a seeded share of the distinct prompts is held out, at most `max_held_out`; no prompt is
    both a training prompt and a held-out prompt. With an evaluation table its first `max_held_out` rows are held out,
    and the training rows are the prompts that the evaluation table does not have, or all prompts with
    `train_on_evaluation_prompts`.

    Raises:
        DataError: The column of the prompts is missing, fewer than two distinct prompts can be split, or no training
            prompt is left.
    """
    maximum = settings.max_held_out
    if evaluation is not None:
        rows = list(range(len(table)))
        if not settings.train_on_evaluation_prompts:
            are_evaluated = find_evaluated(table, evaluation, settings.column)
            rows = [row for row in rows if not are_evaluated[row]]
            if not rows:
                raise DataError(
                    "prompts: evaluation_prompts_path has all prompts of prompts_path, so no training prompt is left. "
                    "Give other prompts, or set prompts.train_on_evaluation_prompts=true to train on these prompts"
                )
        return rows, list(range(min(maximum, len(evaluation))))
    keys, share = _keys(table, settings.column, "prompts"), settings.held_out_share
    advice = "Give more prompts, or evaluation_prompts_path."
    return hold_out(keys, share, maximum, settings.seed, "held_out", name="prompts", advice=advice)


def name_unevaluated(evaluation: Dataset, settings: PromptsConfig) -> None:
    """Log once in a run how many evaluation prompts are used, if there are more than `max_held_out`."""
    if settings.max_held_out < len(evaluation):
        say_once(
            f"Of {len(evaluation)} evaluation prompts, only the first {settings.max_held_out} are used "
            "(prompts.max_held_out).",
            logging.INFO,
        )


def find_evaluated(table: Dataset, evaluation: Dataset, column: str) -> list[bool]:
    """Return for each row of `table` whether its prompt is one of the evaluation prompts."""
    evaluated = set(_keys(evaluation, column, "evaluation prompts"))
    return [key in evaluated for key in _keys(table, column, "prompts")]


def _prompt_column(table: Dataset, column: str, name: str) -> str:
    """Return the column to read: `column` if the table has it, else the table's first column of `CONVERSATIONS`."""
    used = next((name for name in (column, *CONVERSATIONS) if name in table.column_names), None)
    if used is None:
        raise DataError(
            f"{name}: no column `{column}` (prompts.column); the columns are {', '.join(table.column_names)}"
        )
    return used


def _keys(table: Dataset, column: str, name: str) -> list[int]:
    """Return a key of each prompt, equal for copies of a prompt. The key is a hash, which is smaller than the text.

    The key of a chat includes the system message and the tools.
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
    """Return a text that is equal for copies of a chat with its tools, whatever the order of the keys."""
    return as_json([chat, tools], sort_keys=True)


def _shown_beside(table: Dataset, used: str) -> list[str]:
    """Return the columns with which the chat template renders chats in the column `used`."""
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
    """Return the columns `PROMPT_COLUMNS` of a batch of rows.

    `others` are the columns named in `beside`, then the row numbers. `version` and `dates` are only part of the cache's
    key, so that cached rows of an older version or an earlier day are not reused.
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
    """Return a row's prompt with the system message from `cells`, and the row's tools; plain text has no system message
    and no tools.
    """
    prompt = _read(value, f"{row}, column `{column}`", column)
    if isinstance(prompt, str):
        return prompt, None
    return with_system(prompt, cells.get(SYSTEM), f"{row}, column `{column}`"), read_tools(cells.get(TOOLS), row)


def _read(value: Any, where: str, column: str) -> str | Chat:
    """Return a prompt: text or a chat. A column of whole conversations loses the last reply of the assistant."""
    prompt = read_text_or_chat(value, where)
    if column not in CONVERSATIONS or isinstance(prompt, str) or prompt[-1]["role"] != ASSISTANT:
        return prompt
    if len(prompt) == 1:
        raise DataError(f"{where}: the only message is the assistant's, so the conversation has no prompt")
    return prompt[:-1]


def _truncate_left(prompt_ids: list[int], *, room: int, bos: int | None) -> dict[str, Any]:
    """Cut off the beginning of a prompt, but keep the BOS: models have not been trained on texts without BOS."""
    kept = prompt_ids[-room:]
    if len(prompt_ids) > room >= 2 and prompt_ids[0] == bos:
        kept = [prompt_ids[0], *kept[1:]]
    return {"prompt_ids": kept, "prompt_length": len(kept)}
