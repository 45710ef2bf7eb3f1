"""Episodes of several turns: a user's environment replies to each of the policy's turns.

An episode is one row: the prompt, the policy's first turn up to its stop token, the environment's reply, the policy's
next turn, and so on. Only the policy's tokens are actions, which PPO trains on and counts in the KL. The environment's
tokens are context, like the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.tokenizers import continuations
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.sampling import Responses, SamplingSettings


def sample_episodes(
    policy: PreTrainedModel,
    prompts: PromptDataset,
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    engine: str = "static",
    batch_size: int | None = 64,
    halving: Halving | None = None,
) -> Responses:
    """Sample an episode for each of N prompts; the token in column t is drawn with the uniform of column t.

    The environment replies to every turn of the policy that ended in a stop token; if the environment has no reply, the
    episode is over. An episode is cut off if a turn of the policy has no stop token, or if the environment's reply and
    one more turn do not fit into the T = `response_length` tokens of an episode. `sample_episodes` takes the same
    arguments as `generate_responses`.

    Raises:
        RewardError: The user's environment raised an exception or returned a wrong reply; see
            `environments.reply_by_function`.
    """
    rows, width = uniforms.shape
    assert settings.turn_length is not None  # PPOConfig requires both `environment` and `turn_length`, or neither
    turn_settings = replace(settings, response_length=settings.turn_length)
    logprobs = torch.zeros(rows, width, dtype=compute_dtype(policy))

    def sample_turns(live: list[int], ids: list[list[int]]) -> tuple[list[list[int]], list[bool]]:
        contexts = [prompts.prompt_ids[row] + ids[row] for row in live]
        columns = torch.tensor([len(ids[row]) for row in live])[:, None] + torch.arange(turn_settings.response_length)
        noise = uniforms[live].gather(1, columns)
        how: dict[str, Any] = {"engine": engine, "batch_size": batch_size, "halving": halving}
        turns = generate_responses(policy, contexts, noise, turn_settings, **how)
        assert turns.sampler_logprobs is not None  # `generate_responses` always sets the sampler's log-probabilities
        logprobs[torch.tensor(live)[:, None], columns] = turns.sampler_logprobs
        return turns.token_lists(), turns.terminated.tolist()

    return replace(_play(prompts, settings, width, sample_turns), sampler_logprobs=logprobs)


def play_texts(prompts: PromptDataset, turns: list[list[int]], settings: SamplingSettings) -> Responses:
    """Play an episode with each of N prompts, each of whose turns of the policy has the same given tokens.

    Each of `turns` ends in a stop token, and has at most `settings.turn_length` tokens.
    """

    def repeat(live: list[int], ids: list[list[int]]) -> tuple[list[list[int]], list[bool]]:
        return [turns[row] for row in live], [True] * len(live)

    return _play(prompts, settings, settings.response_length, repeat)


def _play(
    prompts: PromptDataset,
    settings: SamplingSettings,
    width: int,
    take_turns: Callable[[list[int], list[list[int]]], tuple[list[list[int]], list[bool]]],
) -> Responses:
    """Play an episode of at most `width` tokens with each prompt.

    `take_turns` gets the rows whose episodes go on, and the tokens of each episode so far. It returns the tokens of
    the policy's next turn in each of these rows, and whether the turn ended in a stop token.
    """
    environment, turn_length = settings.environment, settings.turn_length
    assert environment is not None  # PPOConfig requires both `environment` and `turn_length`, or neither
    assert turn_length is not None
    rows = len(prompts)
    ids: list[list[int]] = [[] for _ in range(rows)]  # token ids of each episode so far, without the prompt
    is_policy: list[list[bool]] = [[] for _ in range(rows)]
    terminated = torch.zeros(rows, dtype=torch.bool)
    live = list(range(rows))
    while live:
        turns, have_stopped = take_turns(live, ids)
        for row, turn in zip(live, turns, strict=True):
            ids[row] = ids[row] + turn
            is_policy[row] += [True] * len(turn)
        stopped = [row for row, has_stopped in zip(live, have_stopped, strict=True) if has_stopped]
        replies: list[list[int] | None] = []
        if stopped:
            so_far = [ids[row] for row in stopped], [is_policy[row] for row in stopped]
            replies = environment(prompts.select(stopped), *so_far)
        live = []
        for row, reply in zip(stopped, replies, strict=True):
            if reply is None:
                terminated[row] = True
            elif len(ids[row]) + len(reply) + turn_length <= width:
                ids[row] = ids[row] + reply
                is_policy[row] += [False] * len(reply)
                live.append(row)
    response_ids = torch.full((rows, width), settings.pad_token_id)
    policy_mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, tokens in enumerate(ids):
        response_ids[row, : len(tokens)] = torch.tensor(tokens)
        policy_mask[row, : len(tokens)] = torch.tensor(is_policy[row])
    lengths = torch.tensor([len(tokens) for tokens in ids], dtype=torch.long)
    return Responses(response_ids, lengths, terminated, policy_mask)


def turn_texts(
    prompt_ids: list[list[int]], responses: Responses, tokenizer: PreTrainedTokenizerBase
) -> list[list[str]]:
    """Return for each response the list of its turns' texts; [] without an environment.

    The texts of a response's turns join to the response's text. The policy's turns and the environment's replies
    alternate, beginning with a turn of the policy.
    """
    if responses.policy_mask is None:
        return []
    rows = zip(prompt_ids, responses.token_lists(), responses.policy_mask.tolist(), strict=True)
    return [texts_of_turns(prompt, ids, is_policy[: len(ids)], tokenizer) for prompt, ids, is_policy in rows]


def texts_of_turns(
    prompt_ids: list[int], ids: list[int], is_policy: list[bool], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return the texts of one response's turns; see `turn_texts`."""
    tokens = zip(ids, is_policy, strict=True)
    turns = [[token for token, _ in turn] for _, turn in groupby(tokens, key=lambda pair: pair[1])]
    before = list(accumulate(turns, initial=prompt_ids))[:-1]
    return continuations(tokenizer, before, turns)
