"""Scores of responses: the inputs and outputs of reward components, and the weighted sum of the components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserList
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.core.option_names import RewardCombination
from ppo_rlhf.data.chats import Chat
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.rewards.combination_rules import check_combination, check_whole

TURNS = "turns"
MESSAGES = "messages"
AGAINST = "against_completions"
"""Name of the argument with the responses that a judge compares the completions with: the SFT policy's."""


class DecodedWhenRead(UserList[str]):
    """A list of texts that is decoded on first access.

    Only the main process calls reward functions, so all processes except the main process never decode the texts.
    """

    def __init__(self, texts: Callable[[], list[str]] | Iterable[str]) -> None:
        """Take a function that returns the texts, or the texts themselves, which Python passes to copy or slice the
        list.
        """
        if callable(texts):
            self._decode = texts
        else:
            self.data = list(texts)

    @cached_property
    def data(self) -> list[str]:  # type: ignore[override]  # UserList assigns `data` in __init__
        """The decoded texts of the list."""
        return self._decode()


@dataclass(frozen=True)
class ResponseBatch:
    """N responses to score: as texts for reward functions, and as token ids for reward models."""

    prompts: list[str]
    completions: Sequence[str]  # texts of the N responses, without special tokens
    columns: dict[str, list[Any]]  # the other columns of the prompt table, with N entries each
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]  # token ids of each response; a terminated response includes its stop token
    terminated: list[bool]  # True: a stop token ended the response; False: the length limit cut it off
    # texts of the turns of each response in order: policy, environment, policy, …; empty: every response is one turn
    turns: list[list[str]] = field(default_factory=list)
    # [N, T] bool, True on tokens that the policy sampled; None: the policy sampled all tokens
    policy_mask: Tensor | None = None
    # For each prompt, its chat with the response (`rendering.conversations`), or None if the prompt is plain text. An
    # empty list of chats means that all prompts are plain text
    chats: list[Chat | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def all_columns(self) -> dict[str, list[Any]]:
        """The columns of the prompt table, with `turns` and `messages` added.

        A single-turn response has one entry in `turns`. `messages` is None for a prompt that is plain text.
        """
        turns = self.turns or [[text] for text in self.completions]
        return {**self.columns, TURNS: turns, MESSAGES: self.chats or [None] * len(self)}


@dataclass(frozen=True)
class Scores:
    """Scores of N responses: `total` [N] is the weighted sum of the unweighted scores [N] in `components`.

    A per-token component scores a response by the sum over its tokens. `token_rewards` [N, longest response] is the
    weighted sum of the per-token components at each token, 0 in the padding; `token_rewards` is None without a
    per-token component. `apart` has the weight of each reward component if each component is normalised separately;
    `apart` is None if the sum of the components is normalised. `combine` is `reward.combine`; if it is not `sum`,
    `total` is the mean of the scores in `components`.
    """

    total: Tensor
    components: dict[str, Tensor]
    token_rewards: Tensor | None = None
    apart: dict[str, float] | None = None
    combine: RewardCombination = "sum"

    @property
    def measured(self) -> list[str]:
        """The names of the components whose running mean and variance a run keeps."""
        return [] if self.apart is None and self.combine == "sum" else list(self.components)


Scoring = Callable[[ResponseBatch], Tensor]
"""A function that returns one score per response, [N], or one per token, [N, longest response] with 0 in the
padding."""


class ModelScoring(ABC):
    """A `Scoring` whose passes halve when memory runs out."""

    @abstractmethod
    def __call__(self, batch: ResponseBatch, halving: Halving | None = None) -> Tensor:
        """Return one score per response, [N]. `halving` halves the passes; None: the scoring's own halving does."""


class RewardScorer:
    """Scores responses by every reward component and adds up the weighted scores."""

    def __init__(
        self,
        components: Sequence[tuple[str, float, Scoring]],
        model: PreTrainedModel | None = None,
        *,
        normalise: Literal["total", "component"] = "total",
        combine: RewardCombination = "sum",
        made_from: tuple[Origin, ...] = (),
    ) -> None:
        """Take (name, weight, scoring) of each reward component, and the reward model if a component uses a reward
        model; of several reward models, the one from which `ppo.value_model=reward_init` starts the critic.

        `normalise` is what `ppo.reward_normalisation` normalises: the sum, or each component before the sum. `combine`
        is `reward.combine`. `made_from` are the reward models as origins of the policy.

        Raises:
            ConfigError: `combine` does not fit the components or `normalise`.
        """
        check_combination(combine, normalise, {name: weight for name, weight, _ in components})
        self.normalise = normalise
        self.combine = combine
        self.names = [name for name, _, _ in components]
        self.model = model
        self.made_from = made_from
        self.components = list(components)

    def score(self, batch: ResponseBatch, halving: Halving | None = None) -> Scores:
        """Return the scores in float64 on the CPU: float32 would lose small differences between large scores.

        In a distributed run every process passes the whole batch. The main process calls the functions. The reward
        model scores one shard in each process. Every process returns all scores. `halving` halves the responses of a
        reward model's passes when memory runs out; None: the halving that each reward model has for such calls.

        Raises:
            ConfigError: A component returns rewards per token, and `combine` is not `sum`.
            RewardError: A reward function raised an exception, or a score is not a finite float32 number.
        """
        scores: dict[str, Tensor] = {}
        total, token_rewards = torch.zeros(len(batch), dtype=torch.float64), None
        for name, weight, scoring in self.components:
            scored = scoring(batch, halving) if isinstance(scoring, ModelScoring) else scoring(batch)
            rewards = scored.to("cpu", torch.float64)
            if rewards.dim() == 2:
                check_whole(self.combine, name)
                # Tokens of the environment are not actions of the policy, so tokens of the environment get no reward
                if batch.policy_mask is not None:
                    rewards = torch.where(batch.policy_mask[:, : rewards.shape[1]], rewards, 0.0)
                token_rewards = weight * rewards + (0.0 if token_rewards is None else token_rewards)
                rewards = rewards.sum(-1)
            scores[name] = rewards
            total = total + weight * rewards
        if self.combine != "sum":
            total = total / len(scores)
        weights = {name: weight for name, weight, _ in self.components}
        match self.normalise:
            case "total":
                return Scores(total, scores, token_rewards, None, self.combine)
            case "component":
                return Scores(total, scores, token_rewards, weights, self.combine)
            case unknown:
                assert_never(unknown)
