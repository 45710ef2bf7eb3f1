"""What the critic reads with `ppo.critic_column`: a column of the row before the prompt. The policy never reads it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompt_dataset import PromptDataset, as_json
from ppo_rlhf.models.tokenizers import encode_texts

ROWS = 1_000
"""Rows of which the tokens are in memory at a time while a whole table is checked."""


def critic_prompt_ids(
    prompts: PromptDataset, config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]] | None:
    """Return the token ids that the critic reads before each response; None without `ppo.critic_column`.

    They are the column's text, the tokenizer's end of text, if it has one, and the prompt. The end of text keeps, say,
    the answer 4 before a prompt that begins with 2 from being read as 42.
    """
    if config.critic_column is None:
        return None
    answers = encode_texts([_text(value) for value in prompts.columns[config.critic_column]], tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [[*answer, *end, *prompt] for answer, prompt in zip(answers, prompts.prompt_ids, strict=True)]


def longest_critic_prompt(prompts: PromptDataset, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that the critic reads before a response; 0 without `ppo.critic_column`.

    Raises:
        DataError: The prompts lack the column, a value of the column is neither text nor a number nor a list, or the
            tokenizer knows no word of the column.
    """
    column, unread = config.critic_column, {tokenizer.unk_token_id, *tokenizer.all_special_ids}
    if column is None:
        return 0
    if column not in prompts.columns:
        names = ", ".join(prompts.columns) or "none"
        raise DataError(
            f"ppo.critic_column={column}: the prompts have no such column; their columns beside the prompt: {names}"
        )
    longest, is_known = 0, False
    for first in range(0, len(prompts), ROWS):
        part = prompts.select(range(first, min(first + ROWS, len(prompts))))
        for row, value in enumerate(part.columns[column], first):
            if not isinstance(value, str | int | float | list) or value != value:  # NaN differs from itself
                raise DataError(
                    f"ppo.critic_column={column}: row {row} has {value!r:.60}, which is neither text nor a number nor "
                    "a list; fill the column in every row, or leave out ppo.critic_column"
                )
        rows = critic_prompt_ids(part, config, tokenizer) or []
        longest = max([longest, *map(len, rows)])
        is_known = is_known or any(
            not unread.issuperset(ids[: len(ids) - len(prompt)])
            for ids, prompt in zip(rows, part.prompt_ids, strict=True)
        )
    if not is_known:
        raise DataError(
            f"ppo.critic_column={column}: the tokenizer knows no word of this column, so the critic would read nothing "
            "of it; name another column, or leave out ppo.critic_column"
        )
    return longest


def check_critic_column(
    prompts: PromptDataset, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, context: int | None, why: str = ""
) -> None:
    """Check that the critic can read `ppo.critic_column` before each prompt and its response.

    Args:
        prompts: The prompts to train on.
        config: Hyperparameters.
        tokenizer: The policy's tokenizer.
        context: The most tokens that the critic reads; None sets no limit.
        why: The reason for `context`, for the error (`usable_context`).

    Raises:
        DataError: The sequences are longer than `context`, or `longest_critic_prompt` refuses the column.
    """
    longest = longest_critic_prompt(prompts, config, tokenizer)
    if context is not None and longest + config.response_length > context:
        raise DataError(
            f"ppo.critic_column={config.critic_column}: with the column before its prompt the critic would read up to "
            f"{longest} tokens and a response of {config.response_length}, but its context has {context}; shorten the "
            f"column, or lower ppo.response_length{why}"
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)
