"""Rollouts: sampled responses with what policy, reference and critic say of them before the update."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.statistics import masked_mean
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.captures import UPDATE
from ppo_rlhf.models.forward import backbone_of, hidden_states_at, packs
from ppo_rlhf.models.free_memory import sequences_at_a_time
from ppo_rlhf.models.transfers import on_device, to_device
from ppo_rlhf.models.weight_copies import copied_weights
from ppo_rlhf.ppo.batch_sampling import captured_by
from ppo_rlhf.ppo.engines import Responses, generates
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward, PolicyOutput, filled_rows, response_statistics
from ppo_rlhf.ppo.micro_batches import Epochs, cut_batch, first_epoch, first_shards, token_budget
from ppo_rlhf.ppo.precision import autocast, deterministic, fills_rows
from ppo_rlhf.ppo.sequences import SequenceBatch, in_common_shapes, make_batch
from ppo_rlhf.ppo.state import LOGPROBS, VALUES, TrainingState
from ppo_rlhf.rewards.scoring import Scores
from ppo_rlhf.runtime.processes import dealt_rows, gather_dealt, own_rank, process_count

log = logging.getLogger(__name__)

LOGPROB_GAP = "policy/rollout_logprob_gap"
MOST_AT_FIRST, ALWAYS_FINE, JUMP = 0.1, 0.01, 5.0
"""Nats a token: most of an engine's gap in its first rollouts; what is fine later, as are so many times the first gap.
bfloat16 makes about 0.01, other weights made 1.2 (embeddings that were tied)."""


@dataclass(frozen=True)
class Rollouts:
    """B responses of width T, of all processes; log-probabilities, entropy and KL are in nats.

    They are 0 in padding and on tokens of an environment. Tensors are on the CPU.
    """

    iteration: int  # of these rollouts, from 1
    prompts: PromptDataset  # B rows
    responses: Responses
    old_logprobs: Tensor  # [B, T], of the forward pass that is trained
    reference_logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T], of the tempered policy
    values: Tensor  # [B, T + 1]: column t is V(s_t), before response token t; column lengths[i] is after row i's last
    epochs: Epochs  # the minibatches of every epoch of the update
    full_kl: Tensor | None = None  # [B, T], over the whole vocabulary, if it is the estimator
    common_shapes: bool = False  # in the passes of policy and critic, which CUDA graphs may hold
    scores: Scores | None = None  # those that decided which prompts were dropped, if `drop_uniform_prompts` is set
    redraws: int = 0  # in place of dropped prompts

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, True on the response tokens that the policy wrote."""
        return self.responses.mask

    @property
    def kl(self) -> Tensor:
        """`[B, T]`, k1 = log pi - log pi_ref."""
        return torch.where(self.mask, self.old_logprobs - self.reference_logprobs, 0.0)

    def kl_penalty(self, estimator: str) -> Tensor:
        """Return the KL `[B, T]` by the estimator that the run has chosen."""
        if self.full_kl is not None:
            return torch.where(self.mask, self.full_kl, 0.0)
        return torch.where(self.mask, kl_estimate(self.old_logprobs, self.reference_logprobs, estimator), 0.0)

    @property
    def logprob_gap(self) -> Tensor | None:
        """Mean distance of the sampler's log-probabilities from `old_logprobs`; None if they were sampled elsewhere."""
        sampled, old = self.responses.sampler_logprobs, self.old_logprobs
        return None if sampled is None else masked_mean((sampled.to(old.dtype) - old).abs(), self.mask)

    def sequences(self, groups: list[list[int]], state: TrainingState) -> list[SequenceBatch]:
        """Return each group of rows as inputs of policy and critic on the CPU; see `inputs_that_train`."""
        given = self.prompts.prompt_ids, self.responses, groups
        return inputs_that_train(state, *given, common_shapes=self.common_shapes)


def measure(
    state: TrainingState, reference_policy: PreTrainedModel, prompts: PromptDataset, responses: Responses
) -> Rollouts:
    """Turn responses into the next iteration's rollouts: add what policy, reference and critic say of them.

    There are `batch_size` prompts and responses, these in as many columns as `response_length`.
    """
    config, iteration, lengths = state.config, state.iteration + 1, responses.lengths.tolist()
    with state.clock.timed(LOGPROBS), deterministic(config):
        most_tokens = token_budget(state, max(prompts.lengths))
        epochs = cut_batch(config, iteration, prompts.lengths, lengths, most_tokens, padded=state.computes_padding)
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
        given = prompts.prompt_ids, responses, first_epoch(epochs)
        batches = inputs_that_train(state, *given, common_shapes=common_shapes)
        of_policy = policy_passes(state, batches, epochs, responses.mask, reference)
    old_logprobs, entropy, full_kl, values = of_policy
    return Rollouts(
        iteration=iteration,
        prompts=prompts,
        responses=responses,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        values=critic_values(state, batches, epochs) if values is None else values,
        epochs=epochs,
        full_kl=full_kl,
        common_shapes=common_shapes,
    )


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
    shards = dealt_rows(tokens)
    mine = shards[own_rank()]
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
    return torch.where(responses.mask, gather_dealt(logprobs[mine], shards), 0.0)


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


def policy_passes(
    state: TrainingState,
    batches: list[SequenceBatch],
    epochs: Epochs,
    mask: Tensor,
    reference: PreTrainedModel | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return log-probabilities, entropies, KL and values of the passes that the first epoch repeats, as `Rollouts`."""
    forward, width = PolicyForward(state.policy, state.critic, state.config.temperature), mask.shape[1]
    waiting = nullcontext() if reference is None else on_device(reference, state.device)
    outputs: list[PolicyOutput] = []
    with (
        torch.no_grad(),
        on_device(forward, state.device),
        waiting,
        autocast(state.config, state.device),  # around all of them, so that each weight is cast once
        copied_weights(state.policy, captured_by(state.config, state.captures)),
    ):
        for batch in to_device(batches, state.device):
            outputs.append(forward(batch, with_entropy=True, reference=reference))

    def of_all(name: str, columns: int) -> Tensor:
        return _of_all(state, epochs, [getattr(output, name) for output in outputs], columns)

    return (
        torch.where(mask, of_all("logprobs", width), 0.0),
        torch.where(mask, of_all("entropy", width), 0.0),
        None if reference is None else torch.where(mask, of_all("kl", width), 0.0),
        of_all("values", width + 1) if state.shares_trunk else None,
    )


def critic_values(state: TrainingState, batches: list[SequenceBatch], epochs: Epochs) -> Tensor:
    """Return the values `[B, T + 1]` of a critic of its own, from the passes that the first epoch repeats."""
    forward = CriticForward(state.critic)
    with (
        state.clock.timed(VALUES),
        torch.no_grad(),
        on_device(forward, state.device),
        deterministic(state.config),
        autocast(state.config, state.device),  # around all passes, so that each weight is cast once
    ):
        found = [forward(batch) for batch in to_device(batches, state.device)]
        return _of_all(state, epochs, found, state.config.response_length + 1)


def _of_all(state: TrainingState, epochs: Epochs, found: list[Tensor], width: int) -> Tensor:
    """Return `[B, width]` on the CPU from what this process found for each micro-batch of the first epoch."""
    shards = first_shards(epochs)
    own = filled_rows(sum(map(len, shards)), width, first_epoch(epochs), found, state.statistics_dtype)
    return gather_dealt(own[shards[own_rank()]], shards)
