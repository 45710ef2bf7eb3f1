"""Computes rollouts: responses with log-probabilities of policy and reference, and the critic's values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.statistics import masked_mean
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.passes.forward import backbone_of, hidden_states_at
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.response_logprobs import response_statistics
from ppo_rlhf.passes.rows import filled_rows, table_by_rows
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.passes.sequences import SequenceBatch, make_batch
from ppo_rlhf.passes.transfers import on_device, to_device
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward, PolicyOutput
from ppo_rlhf.ppo.micro_batches import Epochs, cut_batch, first_shards, own_micro_batches, token_budget
from ppo_rlhf.ppo.precision import autocast, deterministic, fills_rows, frozen_dtype
from ppo_rlhf.ppo.state import LOGPROBS, VALUES, TrainingState
from ppo_rlhf.rewards.scoring import Scores
from ppo_rlhf.runtime.processes import gather_dealt, own_rank

log = logging.getLogger(__name__)

T = TypeVar("T")

LOGPROB_GAP = "policy/rollout_logprob_gap"
MOST_AT_FIRST, ALWAYS_FINE, JUMP = 0.1, 0.01, 5.0
"""Limits on the mean gap between vLLM's log-probabilities and the policy's, in nats per token. The limit is
`MOST_AT_FIRST` in the first rollouts, and max(`ALWAYS_FINE`, `JUMP` x the gap of the first rollouts) in later rollouts.
The rounding of bfloat16 alone gives a gap of about 0.01; wrong weights (embeddings that were tied) gave a gap of
1.2."""


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of one iteration: B responses of T columns from all processes, on the CPU.

    Log-probabilities, entropy and KL are in nats. All three are 0 in padding and on an environment's tokens.
    """

    iteration: int  # number of the iteration, counted from 1
    prompts: PromptDataset  # the batch's B prompts
    responses: Responses
    old_logprobs: Tensor  # [B, T], the policy's log-probabilities, computed by the same forward pass as in the update
    reference_logprobs: Tensor  # [B, T], the reference policy's log-probabilities
    entropy: Tensor  # [B, T], the policy's entropy at the sampling temperature
    # [B, T + 1]: column t is the critic's V(s_t) before response token t; column lengths[i] is after row i's last token
    values: Tensor
    # [B, T], KL from the reference policy over the whole vocabulary; None unless `kl_estimator=full`
    full_kl: Tensor | None = None
    # With `drop_uniform_prompts`, the scores by which prompts with equal scores were dropped
    scores: Scores | None = None
    redraws: int = 0  # how many times dropped prompts were replaced by newly drawn prompts

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, True on the response tokens that the policy wrote."""
        return self.responses.mask

    @property
    def kl(self) -> Tensor:
        """`[B, T]`, the estimate k1 = log pi - log pi_ref, in nats."""
        return torch.where(self.mask, self.old_logprobs - self.reference_logprobs, 0.0)

    def kl_penalty(self, estimator: str) -> Tensor:
        """Return the KL from the reference policy `[B, T]` by the run's KL estimator, in nats."""
        if self.full_kl is not None:
            return torch.where(self.mask, self.full_kl, 0.0)
        return torch.where(self.mask, kl_estimate(self.old_logprobs, self.reference_logprobs, estimator), 0.0)

    @property
    def logprob_gap(self) -> Tensor | None:
        """Mean of |sampler's log-probabilities - `old_logprobs`|; None if the user's script sampled the responses."""
        sampled, old = self.responses.sampler_logprobs, self.old_logprobs
        return None if sampled is None else masked_mean((sampled.to(old.dtype) - old).abs(), self.mask)


@dataclass(frozen=True)
class UpdatePlan:
    """How an iteration's update cuts its responses. Rollouts and update share the plan, which the state keeps."""

    prompts: PromptDataset  # one for each response
    responses: Responses  # the responses that are cut
    epochs: Epochs  # the minibatches of each epoch
    pad_token_id: int
    fill: bool  # whether packed token rows are padded to a few common sizes (`precision.fills_rows`)
    halvings: int = 0  # how many halvings (`TrainingState.update_halving`) are in `epochs`

    @cached_property
    def first_inputs(self) -> list[SequenceBatch]:
        """The inputs of this process's micro-batches of the first epoch, on the CPU.

        Before the update they give log-probabilities and values, and the update repeats the same passes.
        """
        return self.inputs(own_micro_batches(self.epochs[0]))

    @property
    def most_rows(self) -> int:
        """The rows of the largest of this process's micro-batches of the first epoch."""
        return max(minibatch.most_rows for minibatch in self.epochs[0])

    def inputs(self, groups: list[list[int]]) -> list[SequenceBatch]:
        """Make the inputs of policy and critic of micro-batches, each a list of rows."""
        return sequences(self.prompts.prompt_ids, self.responses, groups, self.pad_token_id, fill=self.fill)


def plan_update(state: TrainingState, prompts: PromptDataset, responses: Responses) -> UpdatePlan:
    """Return the plan of the next update, on these responses."""
    config, epochs = state.config, _cut(state, prompts, responses)
    fill, pad_token_id = fills_rows(config, state.device), state.sampling.pad_token_id
    return UpdatePlan(prompts, responses, epochs, pad_token_id, fill, state.update_halving.count)


def update_plan(state: TrainingState) -> UpdatePlan:
    """Return the state's plan, which `plan_update` made for the responses of this iteration."""
    assert state.plan is not None
    return state.plan


def halve_plan(state: TrainingState) -> UpdatePlan:
    """Cut the state's plan into the smaller micro-batches of `TrainingState.update_halving`, and return the plan."""
    plan = update_plan(state)
    epochs = _cut(state, plan.prompts, plan.responses)
    state.plan = replace(plan, epochs=epochs, halvings=state.update_halving.count)
    return state.plan


def _cut(state: TrainingState, prompts: PromptDataset, responses: Responses) -> Epochs:
    lengths, most_tokens = (prompts.lengths, responses.lengths.tolist()), token_budget(state, max(prompts.lengths))
    padded, halvings = state.computes_padding, state.update_halving.count
    return cut_batch(state.config, state.iteration + 1, *lengths, most_tokens, padded=padded, halvings=halvings)


def measure(
    state: TrainingState, reference_policy: PreTrainedModel, prompts: PromptDataset, responses: Responses
) -> Rollouts:
    """Compute log-probabilities, entropies, KL and values of responses, and return the next iteration's rollouts.

    `prompts` must be `ppo.batch_size` prompts, and `responses` as many responses with `ppo.response_length` columns.
    """
    config = state.config
    with state.clock.timed(LOGPROBS), deterministic(config):
        state.plan = plan_update(state, prompts, responses)
        reads_batches = frozen_dtype(config).itemsize == 2
        if not reads_batches:
            reference_logprobs = compute_logprobs(
                reference_policy,
                prompts.prompt_ids,
                responses,
                config,
                temperature=config.temperature,
                device=state.device,
                batch_size=config.local_rollout_forward_batch_size,
                pad_token_id=state.sampling.pad_token_id,
                halving=state.rollout_halving,
            )

        reference = reference_policy if config.kl_estimator == "full" else None

        def passes(plan: UpdatePlan) -> tuple[list[Tensor], list[PolicyOutput]]:
            of_reference = reference_passes(state, reference_policy, plan) if reads_batches else []
            return of_reference, policy_passes(state, plan, reference)

        def table(results: list[Tensor]) -> Tensor:
            return torch.where(responses.mask, _gathered(state, results, responses.mask.shape[1]), 0.0)

        of_reference, outputs = _in_memory(state, passes)
        if reads_batches:
            reference_logprobs = table(of_reference)
        of = {name: [getattr(output, name) for output in outputs] for name in ("logprobs", "entropy", "kl", "values")}
        old_logprobs, entropy = table(of["logprobs"]), table(of["entropy"])
        full_kl = None if reference is None else table(of["kl"])
        shared_values = _gathered(state, of["values"], config.response_length + 1) if state.shares_trunk else None
    return Rollouts(
        iteration=state.iteration + 1,
        prompts=prompts,
        responses=responses,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        values=critic_values(state) if shared_values is None else shared_values,
        full_kl=full_kl,
    )


def _in_memory(state: TrainingState, compute: Callable[[UpdatePlan], T]) -> T:
    """Return `compute` of the state's plan, whose micro-batches are cut into two for as long as memory runs out."""
    plan = update_plan(state)
    while True:
        with state.update_halving.catching(plan.most_rows):
            return compute(plan)
        plan = halve_plan(state)


def check_weights(rollouts: Rollouts, history: list[dict[str, float]]) -> None:
    """Raise `TrainingError` if vLLM's log-probabilities show that vLLM samples with other weights than the policy's.

    The gap between vLLM's and the policy's log-probabilities is compared with limits from `MOST_AT_FIRST`,
    `ALWAYS_FINE` and `JUMP`.
    """
    gap, first = float(rollouts.logprob_gap or 0.0), history[0].get(LOGPROB_GAP) if history else None
    limit = MOST_AT_FIRST if first is None else max(ALWAYS_FINE, JUMP * first)
    if not gap <= limit:  # `not <=` is also True for a gap of NaN
        raise TrainingError(
            f"iteration {rollouts.iteration}: the engine's log-probabilities differ from the policy's by {gap:.3g} "
            f"nats per token, above {limit:.3g}: the engine holds other weights. No step trained on the tokens; "
            "resume from the last checkpoint"
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
    halving: Halving | None = None,
) -> Tensor:
    """Return the log-probabilities `[N, T]` of the policy's tokens under a model, in nats, and 0 on all other tokens.

    Each process computes its shard of the responses, without gradients (`table_by_rows`).

    Args:
        model: A causal language model with dropout off; an offloaded model is on the device only during the call.
        prompt_ids: N prompts.
        responses: N responses.
        config: Hyperparameters.
        temperature: Divides the logits.
        device: The device to compute on.
        batch_size: Responses per forward pass; None: as many as fit into memory.
        pad_token_id: Any token id, used for padding; no result depends on padding.
        halving: Halves `batch_size` when memory runs out; None: this call's own.
    """
    tokens = [len(ids) + length for ids, length in zip(prompt_ids, responses.lengths.tolist(), strict=True)]

    def logprobs(groups: list[list[int]]) -> Iterator[Tensor]:
        batches = sequences(prompt_ids, responses, groups, pad_token_id, fill=fills_rows(config, device))
        for batch in to_device(batches, device):
            yield _logprobs(model, batch, temperature)

    with autocast(config, device):
        table = table_by_rows(
            model,
            tokens,
            responses.response_ids.shape[1],
            compute_dtype(model),
            logprobs,
            device=device,
            batch_size=batch_size,
            halving=halving,
        )
    return torch.where(responses.mask, table, 0.0)


def _logprobs(model: PreTrainedModel, batch: SequenceBatch, temperature: float) -> Tensor:
    states = hidden_states_at(backbone_of(model), batch.rows, batch.state_positions)
    return response_statistics(model, batch, states, temperature)[0]


def sequences(
    prompt_ids: list[list[int]], responses: Responses, groups: list[list[int]], pad_token_id: int, *, fill: bool
) -> list[SequenceBatch]:
    """Return each group of rows as model inputs on the CPU, trimmed to the longest row of the group.

    With `fill` (`precision.fills_rows`) the inputs are padded to a few common sizes, so that forward passes have few
    shapes.
    """
    ids, lengths = responses.response_ids, responses.lengths
    return [
        make_batch([prompt_ids[row] for row in rows], ids[rows], lengths[rows], pad_token_id, fill=fill)
        for rows in groups
    ]


def reference_passes(state: TrainingState, reference: PreTrainedModel, plan: UpdatePlan) -> list[Tensor]:
    """Return the reference policy's log-probabilities of this process's micro-batches, the policy's own batches.

    In 16 bits the same tokens in another batch get other log-probabilities, because a matrix product of another size
    adds up in another order: by 0.04 nats a token in a model of 135 M parameters. In equal batches equal models give
    equal bits.
    """
    config, device = state.config, state.device
    with torch.no_grad(), on_device(reference, device), autocast(config, device):
        return [_logprobs(reference, batch, config.temperature) for batch in to_device(plan.first_inputs, device)]


def policy_passes(state: TrainingState, plan: UpdatePlan, reference: PreTrainedModel | None) -> list[PolicyOutput]:
    """Run the policy's forward passes on this process's micro-batches of the first epoch.

    The first epoch of the update repeats the same forward passes. With a reference policy the outputs have the KL over
    the whole vocabulary; with a shared trunk they have the values.
    """
    config, device = state.config, state.device
    forward = PolicyForward(state.policy, state.critic, config.temperature)
    reference_on_device = nullcontext() if reference is None else on_device(reference, device)
    with (
        torch.no_grad(),
        on_device(forward, device),
        reference_on_device,
        # One autocast context around all passes, so that autocast casts each weight only once
        autocast(config, device),
    ):
        batches = to_device(plan.first_inputs, device)
        return [forward(batch, with_entropy=True, reference=reference) for batch in batches]


def critic_values(state: TrainingState) -> Tensor:
    """Return the values `[B, T + 1]` of a critic with its own backbone, on the responses of the state's plan.

    The first epoch of the update repeats the critic's forward passes.
    """
    forward, config, device = CriticForward(state.critic), state.config, state.device

    def passes(plan: UpdatePlan) -> list[Tensor]:
        return [forward(batch) for batch in to_device(plan.first_inputs, device)]

    with (
        state.clock.timed(VALUES),
        torch.no_grad(),
        on_device(forward, device),
        deterministic(config),
        # One autocast context around all passes, so that autocast casts each weight only once
        autocast(config, device),
    ):
        return _gathered(state, _in_memory(state, passes), config.response_length + 1)


def _gathered(state: TrainingState, results: list[Tensor], width: int) -> Tensor:
    """Gather a table `[B, width]` on the CPU from all processes.

    `results` holds this process's results, one tensor for each of the process's micro-batches of the first epoch.
    """
    epochs = update_plan(state).epochs
    shards = first_shards(epochs)
    local = filled_rows(sum(map(len, shards)), width, own_micro_batches(epochs[0]), results, state.statistics_dtype)
    return gather_dealt(local[shards[own_rank()]], shards)
