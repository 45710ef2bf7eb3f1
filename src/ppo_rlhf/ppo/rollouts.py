"""Computes rollouts: responses with log-probabilities of policy and reference, and the critic's values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.statistics import masked_mean
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.passes.rows import filled_rows
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.passes.transfers import to_device
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward, PolicyOutput, batch_logprobs, compute_logprobs
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.micro_batches import BatchCut, first_shards
from ppo_rlhf.ppo.precision import deterministic, fills_rows, frozen_dtype, without_gradients
from ppo_rlhf.ppo.progress import LOGPROBS, VALUES, Progress
from ppo_rlhf.ppo.token_budget import token_budget
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
    cut: BatchCut  # how the batch was cut for these passes, which the first epoch of the update repeats
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


def measure(
    learner: Learner,
    sampler: Sampler,
    progress: Progress,
    reference_policy: PreTrainedModel,
    prompts: PromptDataset,
    responses: Responses,
) -> Rollouts:
    """Compute log-probabilities, entropies, KL and values of responses, and return the next iteration's rollouts.

    `prompts` must be `ppo.batch_size` prompts, and `responses` as many responses with `ppo.response_length` columns.
    """
    config, width = learner.config, responses.mask.shape[1]
    pad_token_id = sampler.settings.pad_token_id

    def table(results: list[Tensor]) -> Tensor:
        return torch.where(responses.mask, _gathered(cut, results, width, learner.statistics_dtype), 0.0)

    with progress.clock.timed(LOGPROBS), deterministic(config):
        cut = batch_cut(learner, progress.iteration + 1, prompts, responses, pad_token_id)
        reads_batches = frozen_dtype(config).itemsize == 2
        if not reads_batches:
            reference_logprobs = compute_logprobs(
                reference_policy,
                prompts.prompt_ids,
                responses,
                config,
                temperature=config.temperature,
                device=learner.device,
                batch_size=config.local_rollout_forward_batch_size,
                pad_token_id=pad_token_id,
                halving=sampler.halving,
            )

        reference = reference_policy if config.kl_estimator == "full" else None

        def passes(cut: BatchCut) -> tuple[list[Tensor], list[PolicyOutput]]:
            of_reference = reference_passes(learner, reference_policy, cut) if reads_batches else []
            return of_reference, policy_passes(learner, cut, reference)

        cut, (of_reference, outputs) = _in_memory(learner, cut, passes)
        if reads_batches:
            reference_logprobs = table(of_reference)
        of = {name: [getattr(output, name) for output in outputs] for name in ("logprobs", "entropy", "kl", "values")}
        old_logprobs, entropy = table(of["logprobs"]), table(of["entropy"])
        full_kl = None if reference is None else table(of["kl"])
        if learner.shares_trunk:
            values = _gathered(cut, of["values"], config.response_length + 1, learner.statistics_dtype)
    if not learner.shares_trunk:
        with progress.clock.timed(VALUES):
            cut, values = critic_values(learner, cut)
    return Rollouts(
        iteration=progress.iteration + 1,
        prompts=prompts,
        responses=responses,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        values=values,
        cut=cut,
        full_kl=full_kl,
    )


def batch_cut(
    learner: Learner, iteration: int, prompts: PromptDataset, responses: Responses, pad_token_id: int
) -> BatchCut:
    """Return the cut of an iteration's responses for the learner's passes."""
    return BatchCut(
        learner.config,
        iteration,
        prompts,
        responses,
        most_tokens=token_budget(learner, max(prompts.lengths)),
        padded=learner.computes_padding,
        fill=fills_rows(learner.config, learner.device),
        pad_token_id=pad_token_id,
        halvings=learner.halving.count,
    )


def _in_memory(learner: Learner, cut: BatchCut, compute: Callable[[BatchCut], T]) -> tuple[BatchCut, T]:
    """Return `compute` of a cut, whose micro-batches are cut into two for as long as memory runs out, and the cut."""
    while True:
        with learner.halving.catching(cut.most_rows):
            return cut, compute(cut)
        cut = replace(cut, halvings=learner.halving.count)


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


def reference_passes(learner: Learner, reference: PreTrainedModel, cut: BatchCut) -> list[Tensor]:
    """Return the reference policy's log-probabilities of this process's micro-batches, the policy's own batches.

    In 16 bits the same tokens in another batch get other log-probabilities, because a matrix product of another size
    adds up in another order: by 0.04 nats a token in a model of 135 M parameters. In equal batches equal models give
    equal bits.
    """
    with without_gradients(learner.config, learner.device, reference):
        batches = to_device(cut.first_inputs, learner.device)
        return [batch_logprobs(reference, batch, learner.config.temperature) for batch in batches]


def policy_passes(learner: Learner, cut: BatchCut, reference: PreTrainedModel | None) -> list[PolicyOutput]:
    """Run the policy's forward passes on this process's micro-batches of the first epoch.

    The first epoch of the update repeats the same forward passes. With a reference policy the outputs have the KL over
    the whole vocabulary; with a shared trunk they have the values.
    """
    forward = PolicyForward(learner.policy, learner.critic, learner.config.temperature)
    models = [forward] if reference is None else [forward, reference]
    with without_gradients(learner.config, learner.device, *models):
        batches = to_device(cut.first_inputs, learner.device)
        return [forward(batch, with_entropy=True, reference=reference) for batch in batches]


def critic_values(learner: Learner, cut: BatchCut) -> tuple[BatchCut, Tensor]:
    """Return the values `[B, T + 1]` of a critic with its own backbone, and the cut that fitted into memory.

    The first epoch of the update repeats the critic's forward passes.
    """
    forward, config = CriticForward(learner.critic), learner.config

    def passes(cut: BatchCut) -> list[Tensor]:
        return [forward(batch) for batch in to_device(cut.first_inputs, learner.device)]

    with without_gradients(config, learner.device, forward):
        cut, results = _in_memory(learner, cut, passes)
    return cut, _gathered(cut, results, config.response_length + 1, learner.statistics_dtype)


def _gathered(cut: BatchCut, results: list[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    """Gather a table `[B, width]` on the CPU from all processes.

    `results` holds this process's results, one tensor for each of the process's micro-batches of the first epoch.
    """
    shards = first_shards(cut.epochs)
    local = filled_rows(sum(map(len, shards)), width, cut.first_micro_batches, results, dtype)
    return gather_dealt(local[shards[own_rank()]], shards)
