"""Samples a batch of responses across all processes, and replaces prompts whose responses all score alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms, permutation
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.tokenizers import continuations
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.passes.halvings import Halving, of_evaluations, of_rollouts
from ppo_rlhf.passes.sampling import Responses, SamplingSettings
from ppo_rlhf.passes.transfers import on_device
from ppo_rlhf.ppo.episodes import sample_episodes, turn_texts
from ppo_rlhf.ppo.precision import autocast
from ppo_rlhf.ppo.progress import REWARDS, SAMPLING, Clock
from ppo_rlhf.rewards.rendering import conversations
from ppo_rlhf.rewards.scoring import DecodedWhenRead, ResponseBatch, RewardScorer, Scores
from ppo_rlhf.runtime.processes import dealt_rows, gather_dealt, own_rank


@dataclass
class Sampler:
    """How responses are sampled in training, and read as text."""

    config: PPOConfig
    policy: PreTrainedModel  # the learner's policy
    tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer
    settings: SamplingSettings  # the sampling settings, with the stop token ids of the policy's responses
    # Halvings of the responses that a process samples or scores at a time; until `Halving.agree` they count what
    # happened in this process
    halving: Halving = field(default_factory=of_rollouts)
    # Halvings of the responses of evaluations during training, in this process; a resumed run begins anew
    evaluation_halving: Halving = field(default_factory=of_evaluations)


def sample_batch(
    sampler: Sampler, iteration: int, prompts: PromptDataset, scorer: RewardScorer, clock: Clock
) -> tuple[PromptDataset, Responses, Scores | None, int]:
    """Sample the responses of an iteration, counted from 1.

    With `drop_uniform_prompts` prompts whose responses all score alike are replaced by other prompts. Prompts are
    redrawn at most `drop_uniform_prompts` times; prompts whose responses score alike after the last redraw stay in the
    batch.

    Returns:
        The prompts, one per response; the responses; the scores that decided which prompts were replaced, or None
        without `drop_uniform_prompts`; the number of redraws.
    """
    config, group_size = sampler.config, sampler.config.responses_per_prompt
    chosen = episode_prompts(config.seed, iteration, config.prompts_per_batch, len(prompts))

    def draw(indices: list[int], groups: list[int], attempt: int) -> tuple[PromptDataset, Responses]:
        """Sample responses to the prompts at `indices`, with the noise of redraw `attempt` for the rows of `groups`."""
        stream = f"redraw {attempt}" if attempt else "rollout"
        uniforms = episode_uniforms(config.seed, stream, iteration, config.batch_size, config.response_length)
        drawn = prompts.select([index for index in indices for _ in range(group_size)])
        with clock.timed(SAMPLING):
            responses = sample_responses(
                sampler.policy,
                drawn,
                uniforms[_rows_of(groups, group_size)],
                sampler.settings,
                config,
                batch_size=config.local_rollout_forward_batch_size,
                halving=sampler.halving,
            )
        return drawn, responses

    def score(drawn: PromptDataset, responses: Responses) -> Scores:
        with clock.timed(REWARDS):
            return scorer.score(response_batch(drawn, responses, sampler.tokenizer), sampler.halving)

    chosen_prompts, responses = draw(chosen, list(range(len(chosen))), 0)
    scores, redraws = None, 0
    if config.drop_uniform_prompts:
        scores = score(chosen_prompts, responses)
        while (uniform := uniform_groups(scores.total, group_size)) and redraws < config.drop_uniform_prompts:
            redraws += 1
            drawn, taken = permutation(len(prompts), config.seed, "redrawn prompts", iteration, redraws), {*chosen}
            # With no more prompts than the batch has, a prompt of the batch is drawn again
            order = [index for index in drawn.tolist() if index not in taken] or drawn.tolist()
            indices = [order[number % len(order)] for number in range(len(uniform))]
            new_prompts, new_responses = draw(indices, uniform, redraws)
            new_scores = score(new_prompts, new_responses)
            usable = sorted({*range(len(uniform))} - {*uniform_groups(new_scores.total, group_size)})
            for number in usable:
                chosen[uniform[number]] = indices[number]
            rows = _rows_of([uniform[number] for number in usable], group_size), _rows_of(usable, group_size)
            responses, scores = _with_rows(responses, new_responses, *rows), _with_rows(scores, new_scores, *rows)
        chosen_prompts = prompts.select([index for index in chosen for _ in range(group_size)])
    return chosen_prompts, responses, scores, redraws


def sample_responses(
    policy: PreTrainedModel,
    prompts: PromptDataset,
    uniforms: Tensor,
    sampling: SamplingSettings,
    config: PPOConfig,
    *,
    batch_size: int | None,
    halving: Halving | None = None,
) -> Responses:
    """Sample a response to each of N prompts. Each process samples its shard, and every process returns all responses.

    Args:
        policy: The policy.
        prompts: N prompts.
        uniforms: The noise, `[N, T]` float64 in [0, 1); a `sampling.engine` has its own noise and ignores `uniforms`.
        sampling: The sampling settings; with an environment a response has several turns.
        config: Hyperparameters.
        batch_size: Responses decoded at a time; None: as many as fit into memory.
        halving: Halves `batch_size` when memory runs out; None: this call's own. An engine that is not ours manages its
            own memory.
    """
    if sampling.engine is not None:
        return sampling.engine(policy, prompts.prompt_ids, sampling)
    shards = dealt_rows(prompts.lengths)
    local_rows = shards[own_rank()]
    noise, local_prompts = uniforms[local_rows], prompts.select(local_rows)
    with on_device(policy, policy.device), autocast(config, policy.device):
        if sampling.environment is None:
            sample = partial(generate_responses, policy, local_prompts.prompt_ids)
        else:
            sample = partial(sample_episodes, policy, local_prompts)
        local = sample(noise, sampling, engine=config.rollout_engine, batch_size=batch_size, halving=halving)
    gathered: Any = {name: rows if rows is None else gather_dealt(rows, shards) for name, rows in vars(local).items()}
    return Responses(**gathered)


def response_batch(prompts: PromptDataset, responses: Responses, tokenizer: PreTrainedTokenizerBase) -> ResponseBatch:
    """Return N prompts with their responses as the batch that the reward components score."""
    response_ids = responses.token_lists()
    return ResponseBatch(
        prompts=prompts.texts,
        completions=DecodedWhenRead(partial(continuations, tokenizer, prompts.prompt_ids[:], response_ids)),
        columns=prompts.columns,
        prompt_ids=prompts.prompt_ids,
        response_ids=response_ids,
        terminated=responses.terminated.tolist(),
        turns=turn_texts(prompts.prompt_ids, responses, tokenizer),
        policy_mask=responses.policy_mask,
        chats=conversations(prompts.messages, prompts.prompt_ids, response_ids, responses.policy_mask, tokenizer),
    )


def uniform_groups(scores: Tensor, size: int) -> list[int]:
    """Return the indices of the groups whose scores are all equal; a group is `size` consecutive scores of `[N]`."""
    groups = scores.view(-1, size)
    return [group for group, is_uniform in enumerate((groups == groups[:, :1]).all(dim=1).tolist()) if is_uniform]


def _with_rows(table: Any, other: Any, rows: list[int], other_rows: list[int]) -> Any:
    """Return `table` with the rows at `rows` replaced by the rows of `other` at `other_rows`.

    `table` and `other` are tensors, or dataclasses or dictionaries of tensors.
    """
    # A number is the weight of a reward component, and a text is how scores are combined
    if table is None or isinstance(table, int | float | str):
        return table
    if isinstance(table, dict):
        return {name: _with_rows(value, other[name], rows, other_rows) for name, value in table.items()}
    if not isinstance(table, Tensor):
        return replace(table, **_with_rows(vars(table), vars(other), rows, other_rows))
    # Rewards per token are padded to the longest response of their batch, so widths differ between batches
    if table.dim() == 2:
        width = max(table.shape[1], other.shape[1])
        table, other = (nn.functional.pad(each, (0, width - each.shape[1])) for each in (table, other))
    return table.index_copy(0, torch.tensor(rows, dtype=torch.long), other[other_rows])


def _rows_of(groups: list[int], size: int) -> list[int]:
    """Return the row indices of groups of `size` consecutive rows."""
    return [group * size + offset for group in groups for offset in range(size)]
