"""Prompts: checked, tokenised, split into those trained on and those held out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.data.chats import CHAT, is_chat, render_chat

_JSON_MARK = " (json)"
_OWN_COLUMNS = ("prompt", "prompt_ids")
TOKENISED_TOGETHER = 1000


@settings_group("prompts")
class PromptsConfig:
    """How prompts are read from their table and which are held out for evaluation."""

    column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (`[{"role": …, "content": …}, …]`)."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the prompts held out for evaluation when no evaluation prompts are given; never trained on."""
    max_held_out: Annotated[int, Field(ge=1)] = 512
    """Most prompts held out, and most evaluation prompts used."""
    seed: Seed = 42
    """Chooses which prompts are held out."""


@dataclass(frozen=True)
class PromptDataset:
    """Tokenised prompts with the columns that reward functions are called with. Row i of every list is one prompt."""

    prompt_ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select(self, indices: Sequence[int]) -> PromptDataset:
        """Return the rows at `indices`, in that order; an index may come more than once."""
        return PromptDataset(
            [self.prompt_ids[i] for i in indices],
            [self.texts[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a table with `prompt`, `prompt_ids` and the other columns.

        A column of nested values, of values of several types, or of integers beyond 64 bits is JSON, and its name
        says so: Parquet has no type for it.
        """
        table: dict[str, list[Any]] = {"prompt": self.texts, "prompt_ids": self.prompt_ids}
        for name, values in self.columns.items():
            if name in table:
                continue
            if _has_one_plain_type(values):
                table[name] = values
            else:
                table[name + _JSON_MARK] = [json.dumps(value, default=str) for value in values]
        return pd.DataFrame(table)

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> PromptDataset:
        """Read back what `to_frame` made."""
        columns = {}
        for name in map(str, frame.columns.drop(list(_OWN_COLUMNS))):
            values = frame[name].tolist()
            if name.endswith(_JSON_MARK):
                values = [json.loads(value) for value in values]
            columns[name.removesuffix(_JSON_MARK)] = values
        return cls([[int(i) for i in ids] for ids in frame["prompt_ids"]], frame["prompt"].tolist(), columns)


def split_held_out(
    frame: pd.DataFrame,
    evaluation: pd.DataFrame | None,
    share: float,
    maximum: int,
    seed: int,
    column: str = "prompt",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (prompts to train on, prompts held out).

    Held-out prompts are a seeded share of the distinct prompts, at most `maximum`; copies of one prompt go to one
    side. With an evaluation table of its own every training prompt stays, and its first `maximum` rows are held out.

    Raises:
        DataError: The column is missing, or there are fewer than two distinct prompts to split.
    """
    _check_column(frame, column, "prompts")
    if evaluation is not None:
        return frame.reset_index(drop=True), evaluation.head(maximum).reset_index(drop=True)
    keys = frame[column].map(_key)
    distinct = keys.drop_duplicates().tolist()
    if len(distinct) < 2:
        raise DataError(
            f"prompts: {len(distinct)} distinct prompt(s) cannot be split into training and evaluation; "
            "give more prompts, or evaluation_prompts_path"
        )
    count = min(maximum, max(1, round(share * len(distinct))), len(distinct) - 1)
    chosen = {distinct[i] for i in permutation(len(distinct), seed, "held_out")[:count].tolist()}
    held = keys.isin(chosen)
    held_out = frame[held & ~keys.duplicated()]
    return frame[~held].reset_index(drop=True), held_out.reset_index(drop=True)


def tokenise_prompts(
    frame: pd.DataFrame,
    tokenizer: PreTrainedTokenizerBase,
    *,
    column: str,
    response_length: int,
    context: int | None,
    overlong: Literal["error", "drop", "truncate_left"],
    name: str = "prompts",
    why: str = "",
) -> PromptDataset:
    """Return the tokenised prompts of a table.

    Text is tokenised as the tokenizer does by default (with a BOS if that is its way); chat messages go through its
    chat template with the generation prompt.

    Args:
        frame: Table with `column`; its other columns are kept for reward functions. None may be called `prompt_ids`,
            and `prompt` only the one of the prompts: the tokenised prompts' own columns are. Nor may a name end in
            ` (json)`, their mark of a column kept as JSON.
        tokenizer: The policy's.
        column: Column of texts or message lists.
        response_length: Tokens that must fit behind each prompt.
        context: The model's context in tokens, or None if it has no limit.
        overlong: What to do with prompts longer than `context - response_length`.
        name: Where the table comes from, for errors.
        why: What errors say of a context that is less than the model reads (`models.loading.steady_context`).

    Raises:
        DataError: The column is missing, a column has a name of ours, a row is not text or messages, there is none, or
            a prompt is too long and `overlong` is `error`, or all are and it is `drop`.
    """
    _check_column(frame, column, name)
    if frame.empty:
        raise DataError(f"{name}: there is no prompt")
    for taken in _OWN_COLUMNS:
        if taken in frame.columns and not taken == column == "prompt":
            raise DataError(
                f"{name}: a column is called `{taken}`, which the tokenised prompts (here of `{column}`) have as a "
                "column of their own, so reward functions could not be given it. Rename it, or take it out"
            )
    for marked in map(str, frame.columns):
        if marked.endswith(_JSON_MARK):
            raise DataError(
                f"{name}: a column is called `{marked}`, and the tokenised prompts mark by the ending `{_JSON_MARK}` "
                "what they keep as JSON, so reward functions could not be given it. Rename it, or take it out"
            )
    values = frame[column].tolist()
    texts = [_as_text(value, tokenizer, _where(name, row, column)) for row, value in enumerate(values)]
    ids = _encode(texts, [isinstance(value, str) for value in values], tokenizer)
    if [] in ids:
        raise DataError(f"{_where(name, ids.index([]), column)}: the prompt has no tokens")
    keep = list(range(len(ids)))
    if context is not None:
        room = context - response_length
        if room < 1:
            raise DataError(
                f"ppo.response_length={response_length} leaves no room for a prompt in the model's context of "
                f"{context} tokens; set it to at most {context - 1}{why}"
            )
        too_long = [i for i in keep if len(ids[i]) > room]
        if too_long and overlong == "error":
            longest = max(len(ids[i]) for i in too_long)
            raise DataError(
                f"{name}: {len(too_long)} of {len(ids)} prompts (the first in row {too_long[0]}) are longer than "
                f"{room} tokens, the model's context of {context} less ppo.response_length={response_length}; the "
                f"longest has {longest}. Set ppo.overlong_prompts to drop or truncate_left, or shorten the responses"
                f"{why}"
            )
        if overlong == "drop":
            keep = [i for i in keep if len(ids[i]) <= room]
            if not keep:
                raise DataError(
                    f"{name}: none of {len(ids)} has at most {room} tokens, the model's context of {context} less "
                    f"ppo.response_length={response_length}, and ppo.overlong_prompts=drop leaves longer ones out. Set "
                    f"it to truncate_left, shorten the responses, or give shorter prompts{why}"
                )
        elif overlong == "truncate_left":
            ids = [_truncate_left(tokens, room, tokenizer.bos_token_id) for tokens in ids]
    columns = {str(n): frame[n].tolist() for n in frame.columns if n != "prompt"}
    return PromptDataset(ids, texts, columns).select(keep)


def _check_column(frame: pd.DataFrame, column: str, name: str) -> None:
    if column not in frame.columns:
        raise DataError(f"{name}: no column `{column}`; the columns are {', '.join(map(str, frame.columns))}")


def _where(name: str, row: int, column: str) -> str:
    return f"{name}: row {row}, column `{column}`"


def _as_text(value: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    if isinstance(value, str) and value:
        return value
    if is_chat(value):
        return render_chat(value, tokenizer, where, add_generation_prompt=True)
    raise DataError(f"{where}: expected text or {CHAT}, got {str(value)[:60]!r}")


def _encode(texts: list[str], is_plain: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each text; one that is not plain is a rendered chat, with its special tokens.

    Many are given to the tokenizer at a time: one by one each takes it twice as long.
    """
    ids: list[list[int]] = [[] for _ in texts]
    for plain in (True, False):
        rows = [row for row in range(len(texts)) if is_plain[row] == plain]
        for start in range(0, len(rows), TOKENISED_TOGETHER):
            some = rows[start : start + TOKENISED_TOGETHER]
            found = tokenizer([texts[row] for row in some], add_special_tokens=plain)["input_ids"]
            for row, tokens in zip(some, found, strict=True):
                ids[row] = _open_ended(list(tokens), texts[row], tokenizer) if plain else list(tokens)
    return ids


def _open_ended(tokens: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Drop the end that some tokenizers put behind every text: the response would be over before it begins."""
    adds_end = tokens and tokens[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token))
    return tokens[:-1] if adds_end else tokens


def is_prompt(value: Any) -> bool:
    """Return whether a value of the prompts' column is text, or a list of chat messages."""
    return (isinstance(value, str) and bool(value)) or is_chat(value)


def _has_one_plain_type(values: list[Any]) -> bool:
    types = {type(value) for value in values}
    if types == {int}:
        return all(-(2**63) <= value < 2**63 for value in values)  # Parquet's integers
    return len(types) <= 1 and not types & {list, dict}


def _truncate_left(tokens: list[int], room: int, bos: int | None) -> list[int]:
    """Cut a prompt's beginning off, but for a BOS that it starts with: models know no text without theirs."""
    if len(tokens) <= room or tokens[0] != bos or room < 2:
        return tokens[-room:]
    return [tokens[0], *tokens[len(tokens) - room + 1 :]]


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
