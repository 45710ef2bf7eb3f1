"""Sample responses of one iteration, token by token, as plain data for a JSON file and the token view."""

from __future__ import annotations

from typing import TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.data.readable_prompts import readable_prompts
from ppo_rlhf.models.tokenizers import token_texts
from ppo_rlhf.ppo.experience import Experience

LIMIT = 6
"""Number of an iteration's responses that the token view shows."""


class TokenSample(TypedDict):
    """One response of n tokens."""

    prompt: str  # as people read it: a chat as its turns
    tokens: list[str]  # the texts of the n tokens, whose concatenation is the response
    # N flags: True if the policy wrote the token, False if the token belongs to an environment's reply
    is_policy: list[bool]
    score: float  # the reward's raw score of the response
    terminated: bool  # True if a stop token ended the response
    numbers: dict[str, list[float]]  # for each quantity, by name, one number for each of the n tokens


class TokenSamples(TypedDict):
    """Sample responses of one iteration, sorted from the highest score to the lowest."""

    iteration: int
    responses: int  # number of responses in the whole iteration
    samples: list[TokenSample]


def sample_tokens(experience: Experience, tokenizer: PreTrainedTokenizerBase, limit: int = LIMIT) -> TokenSamples:
    """Return at most `limit` responses, from the best to the worst score in equal steps of rank."""
    rollouts = experience.rollouts
    quantities = {  # quantities of each token: tensors by name, each [B, T] or wider
        "reward": experience.rewards,
        "kl": rollouts.kl,
        "value": rollouts.values,
        "advantage": experience.advantages,
        "return": experience.returns,
        "entropy": rollouts.entropy,
        "logprob": rollouts.old_logprobs,
        "reference_logprob": rollouts.reference_logprobs,
    }
    ids, scores = rollouts.responses.token_lists(), experience.scores.total
    ranked = scores.argsort(descending=True, stable=True)
    rows = ranked[torch.linspace(0, len(ranked) - 1, min(limit, len(ranked))).round().long()].tolist()
    samples = [
        TokenSample(
            prompt=shown,
            tokens=token_texts(tokenizer, rollouts.prompts.prompt_ids[row], ids[row]),
            is_policy=rollouts.mask[row, : len(ids[row])].tolist(),
            score=scores[row].item(),
            terminated=bool(rollouts.responses.terminated[row]),
            numbers={name: values[row, : len(ids[row])].tolist() for name, values in quantities.items()},
        )
        for row, shown in zip(rows, readable_prompts(rollouts.prompts.select(rows)), strict=True)
    ]
    return TokenSamples(iteration=rollouts.iteration, responses=len(ids), samples=samples)
