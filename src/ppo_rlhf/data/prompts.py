"""Prompts: checked, tokenised, and split into training and held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import read_text_or_chat, render_chat
from ppo_rlhf.data.prompt_dataset import PROMPT_COLUMNS, PromptDataset, as_json
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.loading import PretrainedHandle, usable_context
from ppo_rlhf.models.tokenizers import encode_texts


@settings_group("prompts")
class PromptsConfig:
    """How prompts are read from their table, and how many are held out for evaluation."""

    column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (`[{"role": …, "content": …}, …]`). An assistant's
    message at the end is continued. Content may be a list of parts of text, and may be missing beside a tool call."""
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

    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    context: int | None
    """Most tokens of a prompt with its response; None: no limit."""
    response_length: int
    """Tokens that must fit after each prompt."""
    overlong: Literal["error", "drop", "truncate_left"]
    """What to do with prompts longer than `context - response_length`."""
    why: str = ""
    """Ends errors: why the context is less than the model reads (`models.loading.usable_context`)."""

    @classmethod
    def of(cls, policy: PretrainedHandle, ppo: PPOConfig) -> PromptReader:
        """Return what reads the prompts of a stored policy."""
        context, why = usable_context(policy.config())
        return cls(policy.tokenizer(), context, ppo.response_length, ppo.overlong_prompts, why)

    def read(self, frame: pd.DataFrame, column: str, name: str) -> PromptDataset:
        """Return the tokenised prompts of a table.

        Text is tokenised as the tokenizer does by default (with a BOS if it adds one and the text has none); chat
        messages go through its chat template with the generation prompt, and the assistant's last message is continued.

        Args:
            frame: Table with `column`; its other columns are kept for reward functions.
            column: Column of texts or message lists.
            name: Where the table comes from, for errors.

        Raises:
            DataError: The column is missing, another one is called `prompt` or `prompt_ids`, a row is not text or
                messages, there is no row, or as `fit`.
        """
        _check_column(frame, column, name)
        if frame.empty:
            raise DataError(f"{name}: there is no prompt")
        for taken in PROMPT_COLUMNS:
            if taken in frame.columns and not taken == column == "prompt":
                raise DataError(
                    f"{name}: a column is called `{taken}`, a name that the table of tokenised prompts uses itself. "
                    "Rename it, or remove it."
                )
        values = frame[column].tolist()
        texts = [_as_text(value, self.tokenizer, _where(name, row, column)) for row, value in enumerate(values)]
        ids = encode_texts(texts, self.tokenizer, [not isinstance(value, str) for value in values])
        if [] in ids:
            raise DataError(f"{_where(name, ids.index([]), column)}: the prompt has no tokens")
        prompts = PromptDataset(ids, texts, {str(n): frame[n].tolist() for n in frame.columns if n != "prompt"})
        return self.fit(prompts, name)

    def fit(self, prompts: PromptDataset, name: str) -> PromptDataset:
        """Return the prompts that leave room for a response, after `overlong` is done to the others.

        Raises:
            DataError: A prompt is too long and `overlong` is `error`, or all are too long and it is `drop`.
        """
        context, response_length, overlong, why = self.context, self.response_length, self.overlong, self.why
        if context is None:
            return prompts
        room = context - response_length
        if room < 1:
            raise DataError(
                f"ppo.response_length={response_length} leaves no room for a prompt in the model's context of "
                f"{context} tokens; set it to at most {context - 1}{why}"
            )
        lengths = [len(ids) for ids in prompts.prompt_ids]
        fits = [row for row, length in enumerate(lengths) if length <= room]
        if len(fits) == len(prompts):
            return prompts
        limit = f"{room} tokens, the model's context of {context} less ppo.response_length={response_length}"
        if overlong == "error":
            first = next(row for row, length in enumerate(lengths) if length > room)
            raise DataError(
                f"{name}: {len(prompts) - len(fits)} of {len(prompts)} prompts (the first in row {first}) are longer "
                f"than {limit}; the longest has {max(lengths)}. Set ppo.overlong_prompts to drop or truncate_left, or "
                f"shorten the responses{why}"
            )
        if overlong == "truncate_left":
            ids = [_truncate_left(tokens, room, self.tokenizer.bos_token_id) for tokens in prompts.prompt_ids]
            return PromptDataset(ids, prompts.texts, prompts.columns)
        if not fits:
            raise DataError(
                f"{name}: none of {len(prompts)} has at most {limit}, and ppo.overlong_prompts=drop leaves longer ones "
                f"out. Set it to truncate_left, shorten the responses, or give shorter prompts{why}"
            )
        return prompts.select(fits)


def split_held_out(
    frame: pd.DataFrame, evaluation: pd.DataFrame | None, settings: PromptsConfig
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (prompts to train on, prompts held out).

    Held-out prompts are a seeded share of the distinct prompts, at most `max_held_out`; copies of one prompt go to one
    side. With an evaluation table its first `max_held_out` rows are held out, and the prompts that it does not have are
    trained on; with `train_on_evaluation_prompts` all are.

    Raises:
        DataError: The column is missing, there are fewer than two distinct prompts to split, or none to train on.
    """
    _check_column(frame, settings.column, "prompts")
    maximum = settings.max_held_out
    if evaluation is not None:
        are_evaluated = find_evaluated(frame, evaluation, settings.column)
        if not settings.train_on_evaluation_prompts:
            if are_evaluated.all():
                raise DataError(
                    "prompts: evaluation_prompts_path has all of them, so none is left to train on. Give others, or "
                    "set prompts.train_on_evaluation_prompts=true to train on them"
                )
            frame = frame[~are_evaluated]
        return frame.reset_index(drop=True), evaluation.head(maximum).reset_index(drop=True)
    keys, share = [_key(value) for value in frame[settings.column]], settings.held_out_share
    advice = "Give more prompts, or evaluation_prompts_path."
    rows = hold_out(keys, share, maximum, settings.seed, "held_out", name="prompts", advice=advice)
    training, held_out = (frame.iloc[part].reset_index(drop=True) for part in rows)
    return training, held_out


def find_evaluated(frame: pd.DataFrame, evaluation: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Return for each row of a table of prompts whether its prompt is one of the evaluation prompts."""
    _check_column(evaluation, column, "evaluation prompts")
    return frame[column].map(_key).isin(evaluation[column].map(_key))


def _check_column(frame: pd.DataFrame, column: str, name: str) -> None:
    if column not in frame.columns:
        raise DataError(
            f"{name}: no column `{column}` (prompts.column); the columns are {', '.join(map(str, frame.columns))}"
        )


def _where(name: str, row: int, column: str) -> str:
    return f"{name}: row {row}, column `{column}`"


def _as_text(value: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    prompt = read_text_or_chat(value, where)
    return prompt if isinstance(prompt, str) else render_chat(prompt, tokenizer, where, to_answer=True)


def _truncate_left(tokens: list[int], room: int, bos: int | None) -> list[int]:
    """Cut off the beginning of a prompt, but keep its BOS: models have not seen texts without it."""
    if len(tokens) <= room or tokens[0] != bos or room < 2:
        return tokens[-room:]
    return [tokens[0], *tokens[len(tokens) - room + 1 :]]


def _key(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value, sort_keys=True)
