"""Scores of responses: what rewards are given and return, and their weighted sum."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.data.chats import Chat

TURNS = "turns"
MESSAGES = "messages"
AGAINST = "against_completions"
"""By this name a judge gets the responses that it compares the completions with: SFT's to the same prompts."""


class DecodedWhenRead(UserList[str]):
    """Texts that are decoded at the first look: functions see them on the main process only."""

    def __init__(self, texts: Callable[[], list[str]] | Iterable[str]) -> None:
        """Take the function that gives them; or texts, as a slice or a copy does."""
        if callable(texts):
            self._decode = texts
        else:
            self.data = list(texts)

    @cached_property
    def data(self) -> list[str]:  # type: ignore[override]  # UserList sets it at once
        """The texts."""
        return self._decode()


@dataclass(frozen=True)
class ResponseBatch:
    """N responses, as text for functions and as tokens for models."""

    prompts: list[str]
    completions: Sequence[str]  # without special tokens
    columns: dict[str, list[Any]]  # the prompt table's others, N entries each
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]  # one that stopped ends in its stop token
    terminated: list[bool]  # whether each response stopped by itself (False: it was cut off at its length)
    # texts of each response's turns: the policy's, the environment's reply, the policy's, …; empty: there is one turn
    turns: list[list[str]] = field(default_factory=list)
    policy_mask: Tensor | None = None  # [N, T] bool, True on the policy's tokens; None: all tokens are the policy's
    # messages of the prompts with the responses (`rendering.conversations`), None for a text; empty: all are texts
    chats: list[Chat | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def all_columns(self) -> dict[str, list[Any]]:
        """The columns, and `turns` and `messages`, which a function gets if it names them.

        A response without turns is one turn. A prompt that is text has no messages, but None.
        """
        turns = self.turns or [[text] for text in self.completions]
        return {**self.columns, TURNS: turns, MESSAGES: self.chats or [None] * len(self)}


@dataclass(frozen=True)
class Scores:
    """Scores of N responses: `total` [N] is the weighted sum of `components`, each [N] and unweighted.

    The score by a component that gives one number a token is the sum of its numbers. `token_rewards` [N, longest
    response] is the weighted sum of such components by token, 0 after a response; None if there is none. `apart` has
    the weights by component if each is normalised by itself; None: their sum is.
    """

    total: Tensor
    components: dict[str, Tensor]
    token_rewards: Tensor | None = None
    apart: dict[str, float] | None = None


Scoring = Callable[[ResponseBatch], Tensor]
"""Returns one number a response, [N], or one a token, [N, longest response], 0 after a response."""


class RewardScorer:
    """Scores responses by every component and sums them up."""

    def __init__(
        self,
        components: Sequence[tuple[str, float, Scoring]],
        model: PreTrainedModel | None = None,
        *,
        normalise: Literal["total", "component"] = "total",
    ) -> None:
        """Take (name, weight, scoring) of each component, and the reward model if one of them is.

        `normalise` is what `ppo.reward_normalisation` normalises: the sum, or each component before it.
        """
        self.normalise = normalise
        self.names = [name for name, _, _ in components]
        self.model = model
        self.components = list(components)

    def score(self, batch: ResponseBatch) -> Scores:
        """Return the scores, float64 on the CPU: float32 would lose small differences of large scores.

        Of several processes each must be given the whole batch. The main process calls the functions, and each process
        scores its share by the reward model; all get all scores.

        Raises:
            RewardError: A function raised, or a score is not a finite float32 number.
        """
        scores: dict[str, Tensor] = {}
        total, token_rewards = torch.zeros(len(batch), dtype=torch.float64), None
        for name, weight, scoring in self.components:
            found = scoring(batch).to("cpu", torch.float64)
            if found.dim() == 2:
                if batch.policy_mask is not None:  # the environment's tokens are not actions and get no reward
                    found = torch.where(batch.policy_mask[:, : found.shape[1]], found, 0.0)
                token_rewards = weight * found + (0.0 if token_rewards is None else token_rewards)
                found = found.sum(-1)
            scores[name] = found
            total = total + weight * found
        weights = {name: weight for name, weight, _ in self.components}
        return Scores(total, scores, token_rewards, weights if self.normalise == "component" else None)
