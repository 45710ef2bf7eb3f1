"""A user's environment: the Python function that answers the policy's turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import RewardError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.tokenizers import continuations
from ppo_rlhf.ppo.episodes import texts_of_turns
from ppo_rlhf.rewards.functions import RewardFunction, call_function
from ppo_rlhf.rewards.scoring import TURNS


def reply_by_function(
    function: RewardFunction,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    ids: list[list[int]],
    is_policy: list[list[bool]],
) -> list[list[int] | None]:
    """Return the tokens of a function's reply to each episode so far; None where the episode is over.

    With the first three arguments given it is an `Environment` of `ppo.engines`.

    Raises:
        RewardError: As `call_environment`, or a reply has no tokens.
    """
    turns = [texts_of_turns(*row, tokenizer) for row in zip(prompts.prompt_ids, ids, is_policy, strict=True)]
    texts = continuations(tokenizer, prompts.prompt_ids, ids)
    replies = call_environment(function, name, prompts.texts, texts, turns, prompts.columns)
    tokens = [None if text is None else tokenizer.encode(text, add_special_tokens=False) for text in replies]
    if [] in tokens:
        row = tokens.index([])
        raise RewardError(
            f"environment {name} returned {replies[row]!r} for the episode {texts[row][:60]!r}, a reply "
            "without tokens. Return None where an episode is over."
        )
    return tokens


def call_environment(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    turns: list[list[str]],
    columns: dict[str, list[Any]],
) -> list[str | None]:
    """Call a user's environment and check its result: for each episode a reply, or None where the episode is over.

    It is called as a reward function is: with prompts, episodes so far, columns, and `turns` if it names them.

    Raises:
        RewardError: It raised, or returned something else.
    """
    replies = call_function(function, f"environment {name}", prompts, completions, {**columns, TURNS: turns})
    for row, reply in enumerate(replies):
        if reply is not None and not isinstance(reply, str):
            raise RewardError(
                f"environment {name} returned {reply!r:.40} for the episode {completions[row][:60]!r}. Return text, or "
                "None where it is over."
            )
    return replies
