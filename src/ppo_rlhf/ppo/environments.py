"""Calls a user's environment, a Python function that replies to the policy's turns, and tokenizes its replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import RewardError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.tokenizers import continuations
from ppo_rlhf.ppo.episodes import texts_of_turns
from ppo_rlhf.rewards.functions import call_function
from ppo_rlhf.rewards.scoring import TURNS
from ppo_rlhf.runtime.user_functions import RewardFunction


def reply_by_function(
    function: RewardFunction,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    ids: list[list[int]],
    is_policy: list[list[bool]],
) -> list[list[int] | None]:
    """Return the tokens of a function's reply to each episode so far; None where the episode is over.

    With the first three arguments bound, this function is an `Environment` of `passes.engines`.

    Args:
        function: The user's environment.
        name: The environment's name, for error messages.
        tokenizer: The policy's tokenizer.
        prompts: The prompts of the episodes.
        ids: The tokens of each episode so far.
        is_policy: For each token of each episode, whether the policy wrote the token.

    Raises:
        RewardError: The environment raised an exception, returned something other than texts and None, or returned a
            reply without tokens.
    """
    turns = [texts_of_turns(*row, tokenizer) for row in zip(prompts.prompt_ids, ids, is_policy, strict=True)]
    texts = continuations(tokenizer, prompts.prompt_ids, ids)
    replies = call_environment(function, name, prompts.texts, texts, turns, prompts.columns)
    tokens = [None if text is None else tokenizer.encode(text, add_special_tokens=False) for text in replies]
    if [] in tokens:
        row = tokens.index([])
        raise RewardError(
            f"environment {name} returned {replies[row]!r} for the episode {texts[row][:60]!r}: this reply has no "
            "tokens. Return None where an episode is over."
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
    """Call a user's environment, and return its reply to each episode, or None where the episode is over.

    The environment gets the arguments of a reward function: the prompts, the episodes so far as completions, the
    columns, and `turns` if it has a parameter of this name.

    Raises:
        RewardError: The environment raised an exception, or returned something other than texts and None.
    """
    replies = call_function(function, f"environment {name}", prompts, completions, {**columns, TURNS: turns})
    for row, reply in enumerate(replies):
        if reply is not None and not isinstance(reply, str):
            raise RewardError(
                f"environment {name} returned {reply!r:.40} for the episode {completions[row][:60]!r}. Return text, or "
                "None where the episode is over."
            )
    return replies
