"""A batch of responses: sampled by all processes together, and drawn anew where nothing can be learnt from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms, permutation
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.captures import Captures
from ppo_rlhf.models.tokenizers import continuations
from ppo_rlhf.models.transfers import on_device
from ppo_rlhf.models.weight_copies import copied_weights
from ppo_rlhf.ppo.engines import Responses, SamplingSettings, generate_responses
from ppo_rlhf.ppo.episodes import sample_episodes, turn_texts
from ppo_rlhf.ppo.precision import autocast
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.rewards.rendering import conversations
from ppo_rlhf.rewards.scoring import DecodedWhenRead, ResponseBatch, RewardScorer, Scores
from ppo_rlhf.runtime.processes import dealt_rows, gather_dealt, own_rank


def sample_batch(
    state: TrainingState, prompts: PromptDataset, scorer: RewardScorer
) -> tuple[PromptDataset, Responses, Scores | None, int]:
    """Return the prompts of the next iteration, one for each response, and the responses.

    With `drop_uniform_prompts` other prompts are drawn in place of those whose responses all score alike, at most so
    many times; those that are never replaced stay. Then the scores that decided it come, too, else None, and last how
    many times prompts were drawn anew.
    """
    config = state.config
    each, iteration = config.responses_per_prompt, state.iteration + 1
    chosen = episode_prompts(config.seed, iteration, config.prompts_per_batch, len(prompts))

    def draw(indices: list[int], places: list[int], attempt: int) -> tuple[PromptDataset, Responses]:
        """Sample responses to prompts with the noise that an attempt has for these places of the batch."""
        stream = f"redraw {attempt}" if attempt else "rollout"
        uniforms = episode_uniforms(config.seed, stream, iteration, config.batch_size, config.response_length)
        drawn = prompts.select([index for index in indices for _ in range(each)])
        how: dict[str, Any] = {"batch_size": config.local_rollout_forward_batch_size, "captures": state.captures}
        return drawn, sample_responses(
            state.policy, drawn, uniforms[_rows_of(places, each)], state.sampling, config, **how
        )

    chosen_prompts, responses = draw(chosen, list(range(len(chosen))), 0)
    scores, redraws = None, 0
    if config.drop_uniform_prompts:
        scores = scorer.score(response_batch(chosen_prompts, responses, state.tokenizer))
        while (places := uniform_groups(scores.total, each)) and redraws < config.drop_uniform_prompts:
            redraws += 1
            order = permutation(len(prompts), config.seed, "redrawn prompts", iteration, redraws).tolist()
            indices = [order[number % len(order)] for number in range(len(places))]
            others, answers = draw(indices, places, redraws)
            found = scorer.score(response_batch(others, answers, state.tokenizer))
            taken = sorted({*range(len(places))} - {*uniform_groups(found.total, each)})
            for number in taken:
                chosen[places[number]] = indices[number]
            rows = _rows_of([places[number] for number in taken], each), _rows_of(taken, each)
            responses, scores = _with_rows(responses, answers, *rows), _with_rows(scores, found, *rows)
        chosen_prompts = prompts.select([index for index in chosen for _ in range(each)])
    return chosen_prompts, responses, scores, redraws


def sample_responses(
    policy: PreTrainedModel,
    prompts: PromptDataset,
    uniforms: Tensor,
    sampling: SamplingSettings,
    config: PPOConfig,
    *,
    batch_size: int | None,
    captures: Captures | None = None,
) -> Responses:
    """Sample a response to each of N prompts; each process samples its own share, and all get all of them.

    With an environment a response has several turns. `sampling.engine` does all this by itself, without the noise
    `uniforms`, `[N, T]` float64 in [0, 1). `batch_size` responses are decoded at a time; None: what memory allows.
    `captures` are those of the policy's run.
    """
    if sampling.engine is not None:
        return sampling.engine(policy, prompts.prompt_ids, sampling)
    shards = dealt_rows(prompts.lengths)
    mine = shards[own_rank()]
    noise, own_prompts = uniforms[mine], prompts.select(mine)
    captures = captured_by(config, captures)
    with on_device(policy, policy.device), autocast(config, policy.device), copied_weights(policy, captures):
        if sampling.environment is None:
            sample = partial(generate_responses, policy, own_prompts.prompt_ids)
        else:
            sample = partial(sample_episodes, policy, own_prompts)
        own = sample(noise, sampling, engine=config.rollout_engine, batch_size=batch_size, captures=captures)
    of_all: Any = {name: rows if rows is None else gather_dealt(rows, shards) for name, rows in vars(own).items()}
    return Responses(**of_all)


def captured_by(config: PPOConfig, captures: Captures | None) -> Captures | None:
    """Return the graphs that an engine decodes with; None if it captures nothing here."""
    return captures if config.rollout_engine == "static" else None


def response_batch(prompts: PromptDataset, responses: Responses, tokenizer: PreTrainedTokenizerBase) -> ResponseBatch:
    """Return responses to N prompts as rewards take them."""
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
    """Return which groups of so many scores, of `[N]` one after the other, hold equal scores only."""
    groups = scores.view(-1, size)
    return [group for group, alike in enumerate((groups == groups[:, :1]).all(dim=1).tolist()) if alike]


def _with_rows(table: Any, other: Any, rows: list[int], taken: list[int]) -> Any:
    """Return a tensor, or a dataclass or dictionary of them, with rows of another one in place of some of its own."""
    if table is None or isinstance(table, float):  # a component's weight
        return table
    if isinstance(table, dict):
        return {name: _with_rows(value, other[name], rows, taken) for name, value in table.items()}
    if not isinstance(table, Tensor):
        return replace(table, **_with_rows(vars(table), vars(other), rows, taken))
    if table.dim() == 2:  # rewards by token are as wide as the longest response
        width = max(table.shape[1], other.shape[1])
        table, other = (nn.functional.pad(each, (0, width - each.shape[1])) for each in (table, other))
    return table.index_copy(0, torch.tensor(rows, dtype=torch.long), other[taken])


def _rows_of(groups: list[int], size: int) -> list[int]:
    return [group * size + place for group in groups for place in range(size)]
