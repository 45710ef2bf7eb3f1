"""The reference texts, whose perplexity the evaluation measures: which table they are, and their tokens."""

from __future__ import annotations

import pandas as pd
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.data.plain_texts import name_plain_texts
from ppo_rlhf.data.tables import frame_of
from ppo_rlhf.runtime.names import HELD_OUT_DEMONSTRATIONS
from ppo_rlhf.supervised.demonstrations import (
    DataPreparationConfig,
    TokenisedDemonstrations,
    corpus_texts,
    encode_demonstrations,
    read_demonstrations,
    tokenise_demonstrations,
    training_template,
)

NAME = "reference texts"


def choose_reference_texts(
    setting: str | None, given: Dataset | None, held_out: pd.DataFrame | None, columns: DataPreparationConfig
) -> pd.DataFrame | None:
    """Return the reference texts in standard columns (`read_demonstrations`); None without the setting.

    Args:
        setting: `evaluation.reference_texts`.
        given: The table of `reference_texts_path`, if it names one.
        held_out: The demonstrations that SFT held out, if there are any.
        columns: The names of the columns of `given`.

    Raises:
        ConfigError: The setting names a table that is not there.
        DataError: As `read_demonstrations`.
    """
    if setting is None:
        return None
    if setting == HELD_OUT_DEMONSTRATIONS:
        if held_out is None:
            raise ConfigError(
                f"evaluation.reference_texts={setting}: there are none. Run the pipeline data_preparation first, or "
                "set reference_texts_path to a table of texts."
            )
        return held_out
    if given is None:
        raise ConfigError(f"evaluation.reference_texts={setting}: set reference_texts_path, which this setting follows")
    return read_demonstrations(frame_of(given), columns, NAME)


def tokenise_reference_texts(
    table: pd.DataFrame, tokenizer: PreTrainedTokenizerBase, max_length: int | None, *, leaves_out: bool = False
) -> TokenisedDemonstrations:
    """Return the tokens of reference texts; the labels are those that SFT would have by default.

    So the tokens that count are a text's own, a completion's, or those of the assistant's turns of a chat if the chat
    template marks them, else the whole chat's; and the end of text. Texts are cut to `max_length` tokens. With
    `leaves_out` texts without a token that counts are left out, as SFT leaves them out.

    Raises:
        DataError: As `encode_demonstrations`, or a text (with `leaves_out` each text) has no token that counts within
            `max_length`.
    """
    if "messages" not in table:
        name_plain_texts(NAME, corpus_texts(table), tokenizer, are_usual=True)
    is_chats = "messages" in table and "prompt" not in table
    template = training_template(tokenizer, None) if is_chats else None
    if leaves_out:
        return tokenise_demonstrations(table, tokenizer, max_length, NAME, template)
    rows = encode_demonstrations(table, tokenizer, max_length, NAME, template)
    if unlearnt := rows.unlearnt:
        limit = "" if max_length is None else f" within the model's context of {max_length} tokens"
        others = f", nor have {len(unlearnt) - 1} others" if len(unlearnt) > 1 else ""
        raise DataError(
            f"{NAME}: row {unlearnt[0]} has no token whose probability could be measured{limit}{others}. Remove such "
            "rows, or shorten their prompts."
        )
    return rows
