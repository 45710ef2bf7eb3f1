"""Demonstrations: the tables that supervised fine-tuning learns from, checked, split, and turned into tokens.

Three of TRL's formats are read: `text`; `prompt` and `completion`; `messages` (a chat, by the tokenizer's template).
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.data.chats import is_text, read_chat, render_chat
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.tables import hold_out
from ppo_rlhf.models.tokenizers import append_end, encode_texts

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that torch's cross entropy leaves out
PARTS = ("training demonstrations", "held-out demonstrations")
"""Names of the tables that `split_demonstrations` returns, for messages."""


@settings_group("data_preparation")
class DataPreparationConfig:
    """How demonstrations are read, and how many are held out."""

    text_column: str = "text"
    """Column of whole texts."""
    prompt_column: str = "prompt"
    """Column of prompts, in tables of prompts and completions; only completions are learnt."""
    completion_column: str = "completion"
    """Column of completions."""
    messages_column: str = "messages"
    """Column of chats, lists of `{"role": …, "content": …}`; the tokenizer needs a chat template."""
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


def split_demonstrations(frame: pd.DataFrame, config: DataPreparationConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Check the table and return (demonstrations to train on, demonstrations held out).

    Both have the columns `messages`, or `prompt` and `completion`, or `text`: the first that the table has. Chats are
    JSON: Parquet would add the keys of one message to all, and has no type for some chats. Copies of one demonstration
    go to one side, and are held out once.

    Raises:
        DataError: No such columns, a value that is empty or not text, or fewer than two distinct rows.
    """
    table = _standard_columns(frame, config)
    if config.max_demonstrations is not None:
        drawn = permutation(len(table), config.seed, "demonstrations")[: config.max_demonstrations].tolist()
        table = table.iloc[sorted(drawn)]
    keys, share, most = list(table.itertuples(index=False, name=None)), config.held_out_share, config.max_held_out
    rows = hold_out(keys, share, most, config.seed, "demonstrations", name="demonstrations")
    trained, held_out = (table.iloc[part].reset_index(drop=True) for part in rows)
    return trained, held_out


def tokenise_demonstrations(
    frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase, max_length: int | None, name: str = "demonstrations"
) -> TokenisedDemonstrations:
    """Return token sequences and labels of a table that `split_demonstrations` made.

    The end of text closes texts and completions. Where there are prompts, only completions are learnt; texts and chats
    are learnt whole. Longer sequences are cut at `max_length` tokens, and then have no end of text.

    Raises:
        DataError: There are chats and no chat template, or nothing to learn within `max_length`.
    """
    encode = _encode_chats if "messages" in frame.columns else _encode_texts
    input_ids, labels, truncated = [], [], 0
    for ids, learnt in encode(frame, tokenizer):
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


def corpus_texts(frame: pd.DataFrame) -> Iterator[str]:
    """Yield the texts that a tokenizer can be trained on.

    Raises:
        DataError: The demonstrations are chats, which need a tokenizer with a chat template.
    """
    if "messages" in frame.columns:
        raise DataError("demonstrations: chats need a model with a chat template. Set base_model_path.")
    for row in frame.to_dict("records"):
        yield row["text"] if "text" in row else row["prompt"] + row["completion"]


def _standard_columns(frame: pd.DataFrame, config: DataPreparationConfig) -> pd.DataFrame:
    formats = [
        {config.messages_column: "messages"},
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
        values = [(value, f"demonstrations: row {row}, column `{given}`") for row, value in enumerate(table[standard])]
        if standard == "messages":
            table[standard] = [as_json(read_chat(value, where)) for value, where in values]
            continue
        for value, where in values:
            if not is_text(value):
                raise DataError(f"{where}: expected text that is not empty, got {value!r:.60}")
    return table


Encoded = Iterator[tuple[list[int], list[int]]]
"""The tokens and the labels of each row."""


def _encode_texts(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    whole_texts = "text" in frame.columns
    prompts = [""] * len(frame) if whole_texts else frame["prompt"].tolist()
    completions = frame["text" if whole_texts else "completion"].tolist()
    wholes = encode_texts([p + c for p, c in zip(prompts, completions, strict=True)], tokenizer)
    for prompt, whole in zip(encode_texts(prompts, tokenizer), wholes, strict=True):
        closed = append_end(whole, tokenizer.eos_token_id)
        # tokens may merge across the boundary: learning begins where the two differ, as in TRL
        shared = next((i for i, (a, b) in enumerate(zip(prompt, closed, strict=False)) if a != b), len(prompt))
        yield closed, [IGNORED] * shared + closed[shared:]


def _encode_chats(frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    for chat in frame["messages"]:
        text = render_chat(json.loads(chat), tokenizer, "demonstrations")
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        yield ids, list(ids)
