"""One iteration's rollouts: responses to a batch of prompts, with the log-probabilities that PPO compares."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms, permutation
from ppo_rlhf.core.statistics import masked_mean
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.captures import UPDATE, Captures
from ppo_rlhf.models.forward import backbone_of, hidden_states_at, packs
from ppo_rlhf.models.free_memory import sequences_at_a_time
from ppo_rlhf.models.tokenizers import continuations
from ppo_rlhf.models.transfers import on_device, to_device
from ppo_rlhf.models.weight_copies import copied_weights
from ppo_rlhf.ppo.batch import Epochs, SequenceBatch, cut_batch, first_epoch, first_hands, make_batch
from ppo_rlhf.ppo.common_shapes import in_common_shapes
from ppo_rlhf.ppo.episodes import sample_episodes, turn_texts
from ppo_rlhf.ppo.logprobs import PolicyForward, PolicyOutput, filled_rows, response_statistics
from ppo_rlhf.ppo.precision import autocast, deterministic, fills_rows
from ppo_rlhf.ppo.sampling import Responses, SamplingSettings, generate_responses, generates
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.ppo.token_budget import token_budget
from ppo_rlhf.processes import dealt_rows, gather_dealt, own_rank, process_count
from ppo_rlhf.rewards.rendering import conversations
from ppo_rlhf.rewards.scoring import DecodedWhenRead, ResponseBatch, RewardScorer, ScoredResponses

log = logging.getLogger(__name__)

LOGPROB_GAP = "policy/rollout_logprob_gap"
MOST_AT_FIRST, ALWAYS_FINE, JUMP = 0.1, 0.01, 5.0
"""Nats a token: most of an engine's gap in its first rollouts; what is fine later, as are so many times the first gap.
bfloat16 makes about 0.01, other weights made 1.2 (embeddings that were tied)."""


@dataclass(frozen=True)
class Rollouts:
    """B responses of width T, of all processes; log-probabilities and entropy are in nats.

    They are 0 in padding and on tokens of an environment. Tensors are on the CPU.
    """

    iteration: int  # of these rollouts, from 1
    prompts: PromptDataset  # B rows
    responses: Responses
    texts: ResponseBatch  # the same as rewards take them
    old_logprobs: Tensor  # [B, T], of the forward pass that is trained
    reference_logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T], of the tempered policy
    epochs: Epochs  # the minibatches of every epoch of the update
    started: float  # time.perf_counter() when the iteration began
    generation_seconds: float | None  # None if the responses were sampled elsewhere
    seconds: float
    values: Tensor | None = None  # [B, T + 1], of the same forward passes, if policy and critic share their trunk
    full_kl: Tensor | None = None  # [B, T], KL over the whole vocabulary, of the same passes, if it is the estimator
    reference_policy: PreTrainedModel | None = None  # if the loss has this KL: it runs again in each step
    scored: ScoredResponses | None = None  # what decided which prompts were dropped, if `drop_uniform_prompts` is set
    redraws: int = 0  # in place of dropped prompts
    common_shapes: bool = False  # in the passes of policy and critic, which CUDA graphs may hold

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, True on the response tokens that the policy wrote."""
        return self.responses.mask

    @property
    def logprob_gap(self) -> Tensor | None:
        """Mean distance of the sampler's log-probabilities from `old_logprobs`; None if they were sampled elsewhere."""
        sampled, old = self.responses.sampler_logprobs, self.old_logprobs
        return None if sampled is None else masked_mean((sampled.to(old.dtype) - old).abs(), self.mask)

    def sequences(self, groups: list[list[int]], state: TrainingState) -> list[SequenceBatch]:
        """Return each group of rows as inputs of policy and critic on the CPU; see `inputs_that_train`."""
        given = self.prompts.prompt_ids, self.responses, groups
        return inputs_that_train(state, *given, common_shapes=self.common_shapes)


def generate_rollouts(
    state: TrainingState,
    reference_policy: PreTrainedModel,
    prompts: PromptDataset,
    config: PPOConfig,
    scorer: RewardScorer,
) -> Rollouts:
    """Sample a response to each prompt of the next iteration and compute its log-probabilities.

    Every process returns the rollouts of all of them. With `drop_uniform_prompts` other prompts are drawn in place of
    those whose responses all score alike, at most so many times; those that are never replaced stay.

    Raises:
        TrainingError: An engine is gone, or holds other weights than the policy's.
    """
    started = time.perf_counter()
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
    scored, redraws = None, 0
    if config.drop_uniform_prompts:
        scored = scorer.score(response_batch(chosen_prompts, responses, state.tokenizer))
        while (places := uniform_groups(scored.total, each)) and redraws < config.drop_uniform_prompts:
            redraws += 1
            order = permutation(len(prompts), config.seed, "redrawn prompts", iteration, redraws).tolist()
            indices = [order[number % len(order)] for number in range(len(places))]
            others, answers = draw(indices, places, redraws)
            found = scorer.score(response_batch(others, answers, state.tokenizer))
            taken = sorted({*range(len(places))} - {*uniform_groups(found.total, each)})
            for number in taken:
                chosen[places[number]] = indices[number]
            rows = _rows_of([places[number] for number in taken], each), _rows_of(taken, each)
            responses, scored = _with_rows(responses, answers, *rows), _with_rows(scored, found, *rows)
        chosen_prompts = prompts.select([index for index in chosen for _ in range(each)])
    times = {"started": started, "generation_seconds": time.perf_counter() - started}
    rollouts = complete_rollouts(state, reference_policy, chosen_prompts, responses, config, **times)
    if state.sampling.engine is not None:
        check_weights(rollouts, state.history)
    return replace(rollouts, scored=scored, redraws=redraws)


def check_weights(rollouts: Rollouts, history: list[dict[str, float]]) -> None:
    """Raise `TrainingError` if an engine's log-probabilities are far from the policy's, or farther than at first."""
    gap, first = float(rollouts.logprob_gap or 0.0), history[0].get(LOGPROB_GAP) if history else None
    limit = MOST_AT_FIRST if first is None else max(ALWAYS_FINE, JUMP * first)
    if not gap <= limit:  # a NaN is not
        raise TrainingError(
            f"iteration {rollouts.iteration}: the engine's log-probabilities of its own tokens are {gap:.3g} nats a "
            f"token from the policy's, above {limit:.3g}: the engine holds other weights. Nothing was learned from "
            "these tokens, and the last checkpoint stands"
        )


def uniform_groups(scores: Tensor, size: int) -> list[int]:
    """Return which groups of so many scores, of `[N]` one after the other, hold equal scores only."""
    groups = scores.view(-1, size)
    return [group for group, alike in enumerate((groups == groups[:, :1]).all(dim=1).tolist()) if alike]


def _with_rows(table: Any, other: Any, rows: list[int], taken: list[int]) -> Any:
    """Return a tensor, or a dataclass or dictionary of them, with rows of another one in place of some of its own."""
    if table is None:
        return None
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
    hands = dealt_rows(prompts.lengths)
    mine = hands[own_rank()]
    noise, own_prompts = uniforms[mine], prompts.select(mine)
    captures = _captured_by(config, captures)
    with on_device(policy, policy.device), autocast(config, policy.device), copied_weights(policy, captures):
        if sampling.environment is None:
            sample = partial(generate_responses, policy, own_prompts.prompt_ids)
        else:
            sample = partial(sample_episodes, policy, own_prompts)
        own = sample(noise, sampling, engine=config.rollout_engine, batch_size=batch_size, captures=captures)
    of_all: Any = {name: rows if rows is None else gather_dealt(rows, hands) for name, rows in vars(own).items()}
    return Responses(**of_all)


def _captured_by(config: PPOConfig, captures: Captures | None) -> Captures | None:
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


def complete_rollouts(
    state: TrainingState,
    reference_policy: PreTrainedModel,
    prompts: PromptDataset,
    responses: Responses,
    config: PPOConfig,
    *,
    started: float,
    generation_seconds: float | None,
) -> Rollouts:
    """Turn responses into the next iteration's rollouts: add old and reference log-probabilities.

    There are `batch_size` prompts and responses, these in as many columns as `response_length`. The iteration `started`
    at that `time.perf_counter()`.
    """
    sampled, iteration, lengths = time.perf_counter(), state.iteration + 1, responses.lengths.tolist()
    most_tokens = token_budget(state, max(prompts.lengths))
    epochs = cut_batch(config, iteration, prompts.lengths, lengths, most_tokens, padded=state.computes_padding)
    with deterministic(config):
        reference_logprobs = compute_logprobs(
            reference_policy,
            prompts.prompt_ids,
            responses,
            config,
            temperature=config.temperature,
            device=state.device,
            batch_size=config.local_rollout_forward_batch_size,
            pad_token_id=state.sampling.pad_token_id,
        )
        reference = reference_policy if config.kl_estimator == "full" else None
        common_shapes = captures_update(state, reference)
        old_logprobs, entropy, full_kl, values = _first_forward(
            state, prompts, responses, epochs, reference, common_shapes=common_shapes
        )
    return Rollouts(
        iteration=iteration,
        prompts=prompts,
        responses=responses,
        texts=response_batch(prompts, responses, state.tokenizer),
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        values=values,
        full_kl=full_kl,
        reference_policy=reference if config.kl_in == "loss" else None,
        epochs=epochs,
        common_shapes=common_shapes,
        started=started,
        generation_seconds=generation_seconds,
        seconds=(generation_seconds or 0.0) + time.perf_counter() - sampled,
    )


def compute_logprobs(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    responses: Responses,
    config: PPOConfig,
    *,
    temperature: float,
    device: torch.device,
    batch_size: int | None,
    pad_token_id: int,
) -> Tensor:
    """Return the log-probabilities `[N, T]` of the policy's tokens under a model, 0 elsewhere.

    Each process computes its share, without gradients. Rows of similar length go together, so that models that need
    padding compute little of it. The model has dropout off; an offloaded one is on the device during the call. A
    forward pass has `batch_size` responses; None: what memory allows. Which id pads has no effect.
    """
    tokens = [len(ids) + length for ids, length in zip(prompt_ids, responses.lengths.tolist(), strict=True)]
    hands = dealt_rows(tokens)
    mine = hands[own_rank()]
    by_length = sorted(mine, key=lambda row: tokens[row])
    dtype = compute_dtype(model)
    found: list[Tensor] = []
    with torch.no_grad(), on_device(model, device), autocast(config, device):
        size = batch_size or sequences_at_a_time(model, len(by_length), max(tokens, default=0))
        groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
        batches = sequences(prompt_ids, responses, groups, pad_token_id, fill=fills_rows(config, device))
        for batch in to_device(batches, device):
            states = hidden_states_at(backbone_of(model), batch.rows, batch.state_positions)
            found.append(response_statistics(model, batch, states, temperature)[0])
    logprobs = filled_rows(len(prompt_ids), responses.response_ids.shape[1], groups, found, dtype)
    return torch.where(responses.mask, gather_dealt(logprobs[mine], hands), 0.0)


def sequences(
    prompt_ids: list[list[int]], responses: Responses, groups: list[list[int]], pad_token_id: int, *, fill: bool
) -> list[SequenceBatch]:
    """Return each group of rows as model inputs, trimmed to the longest of the group; `to_device` copies all of them.

    They are filled up if `fill` (`precision.fills_rows`), so that few shapes occur.
    """
    ids, lengths = responses.response_ids, responses.lengths
    return [
        make_batch([prompt_ids[row] for row in rows], ids[rows], lengths[rows], pad_token_id, fill=fill)
        for rows in groups
    ]


def inputs_that_train(
    state: TrainingState,
    prompt_ids: list[list[int]],
    responses: Responses,
    groups: list[list[int]],
    *,
    common_shapes: bool,
) -> list[SequenceBatch]:
    """Return each group of rows as policy and critic take them, in all passes alike; on the CPU."""
    fill = fills_rows(state.config, state.device) and not common_shapes
    batches = sequences(prompt_ids, responses, groups, state.sampling.pad_token_id, fill=fill)
    columns = responses.response_ids.shape[1]
    return [in_common_shapes(batch, columns) for batch in batches] if common_shapes else batches


def captures_update(state: TrainingState, reference: PreTrainedModel | None) -> bool:
    """Return whether CUDA graphs are to hold the passes of an update; if not although graphs are on, log why.

    The reference is that of the KL over the vocabulary, if it is computed.
    """
    if not state.captures.serves(UPDATE):
        return False
    why = None
    if process_count() > 1:
        why = "several processes train"
    elif state.computes_padding or not (reference is None or packs(backbone_of(reference))):
        why = "an architecture needs padding"
    elif state.sampling.engine is None and generates(state.policy, state.config.rollout_engine):
        # torch's own graphs take the memory away that cuBLAS works in (clear_cublas_manager in its cudagraph_trees.py)
        why = "generate is compiled with graphs of its own, beside which others compute wrong numbers"
    if why is not None and why != state.plain_update:
        log.info("The update runs without CUDA graphs: %s.", why)
    state.plain_update = why
    return why is None


def _first_forward(
    state: TrainingState,
    prompts: PromptDataset,
    responses: Responses,
    epochs: Epochs,
    reference: PreTrainedModel | None,
    *,
    common_shapes: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return log-probabilities, entropies, KL and values of the passes that the first epoch repeats, as `Rollouts`."""
    rows, width = responses.response_ids.shape
    groups, hands = first_epoch(epochs), first_hands(epochs)
    forward = PolicyForward(state.policy, state.critic, state.config.temperature)
    outputs: list[PolicyOutput] = []
    batches = inputs_that_train(state, prompts.prompt_ids, responses, groups, common_shapes=common_shapes)
    waiting = nullcontext() if reference is None else on_device(reference, state.device)
    with (
        torch.no_grad(),
        on_device(forward, state.device),
        waiting,
        autocast(state.config, state.device),  # around all of them, so that each weight is cast once
        copied_weights(state.policy, _captured_by(state.config, state.captures)),
    ):
        for batch in to_device(batches, state.device):
            outputs.append(forward(batch, with_entropy=True, reference=reference))

    def of_all(name: str, columns: int) -> Tensor:
        found = filled_rows(rows, columns, groups, [getattr(out, name) for out in outputs], state.statistics_dtype)
        return gather_dealt(found[hands[own_rank()]], hands)

    return (
        torch.where(responses.mask, of_all("logprobs", width), 0.0),
        torch.where(responses.mask, of_all("entropy", width), 0.0),
        None if reference is None else torch.where(responses.mask, of_all("kl", width), 0.0),
        of_all("values", width + 1) if state.shares_trunk else None,
    )
