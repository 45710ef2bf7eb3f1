"""One iteration's rollouts: responses to a batch of prompts, with the log-probabilities that PPO compares."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.model_rules import excludes_lanes
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms, micro_batches, minibatch_partition
from ppo_rlhf.core.responses import length_mask
from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.offloading import on_device
from ppo_rlhf.models.own_configurations import keep_apart
from ppo_rlhf.ppo.batch import PackedSequences, pack, without_padding
from ppo_rlhf.ppo.lanes import side_by_side
from ppo_rlhf.ppo.logprobs import response_logprobs, response_statistics, scatter_rows
from ppo_rlhf.ppo.precision import autocast, deterministic
from ppo_rlhf.ppo.sampling import Responses, generate_responses
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.ppo.values import response_values
from ppo_rlhf.rewards.scorers import ResponseBatch


@dataclass(frozen=True)
class Rollouts:
    """B responses of width T; tensors lie on the CPU, log-probabilities and entropy are in nats and 0 in padding."""

    iteration: int  # the iteration that these belong to, from 1
    prompts: PromptDataset  # B rows
    completions: list[str]  # decoded without special tokens
    response_ids: Tensor  # [B, T] long
    lengths: Tensor  # [B] long
    terminated: Tensor  # [B] bool, True where a stop token ended the response
    sampler_logprobs: Tensor | None  # [B, T], the decoding loop's own; None of responses that were sampled elsewhere
    old_logprobs: Tensor  # [B, T], of the forward that is trained
    reference_logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T], of the tempered policy
    started: float  # time.perf_counter() when the iteration began
    generation_seconds: float | None  # None if they were sampled elsewhere
    seconds: float
    values: Tensor | None = None  # [B, T + 1] of the same forward passes, if policy and critic share their trunk
    padded: bool = True  # whether policy or critic compute padding, which then counts in the token budget
    side_by_side: bool = False  # whether two models compute at the same time, from the old log-probabilities on

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, True on response tokens."""
        return length_mask(self.lengths, self.response_ids.shape[1])

    def token_lists(self) -> list[list[int]]:
        """Return each response's tokens without padding."""
        return without_padding(self.response_ids, self.lengths)

    def response_batch(self) -> ResponseBatch:
        """Return the responses as rewards take them."""
        return ResponseBatch(
            prompts=self.prompts.texts,
            completions=self.completions,
            columns=self.prompts.columns,
            prompt_ids=self.prompts.prompt_ids,
            response_ids=self.token_lists(),
            terminated=self.terminated.tolist(),
        )

    def micro_batches(self, minibatch: list[int], config: PPOConfig) -> list[list[int]]:
        """Cut a minibatch of row indices into the pieces that go through the model at a time."""
        return _cut(minibatch, self.prompts.prompt_ids, self.lengths, config, padded=self.padded)

    def first_epoch_micro_batches(self, config: PPOConfig) -> list[list[int]]:
        """Return the micro-batches that the update's first epoch will use."""
        return _first_epoch_micro_batches(
            config, self.iteration, self.prompts.prompt_ids, self.lengths, padded=self.padded
        )

    def at_once(self, config: PPOConfig) -> bool:
        """Return whether two models may compute at the same time: `side_by_side`, unless a setting excludes it.

        The rollouts may have been made with other settings than those of the run that learns from them.
        """
        return self.side_by_side and not any(excludes_lanes(config))

    def pack(self, rows: list[int], pad_token_id: int, device: torch.device) -> PackedSequences:
        """Return the given rows as model inputs, trimmed to their longest prompt and response."""
        prompt_ids = [self.prompts.prompt_ids[i] for i in rows]
        return pack(prompt_ids, self.response_ids[rows], self.lengths[rows], pad_token_id, device)


def _cut(
    minibatch: list[int], prompt_ids: list[list[int]], lengths: Tensor, config: PPOConfig, *, padded: bool
) -> list[list[int]]:
    return micro_batches(
        minibatch,
        config.local_micro_batch_size,
        [len(ids) for ids in prompt_ids],
        lengths.tolist(),
        config.max_tokens_per_micro_batch,
        padded=padded,
    )


def _first_epoch_micro_batches(
    config: PPOConfig, iteration: int, prompt_ids: list[list[int]], lengths: Tensor, *, padded: bool
) -> list[list[int]]:
    """Return the micro-batches of the first epoch, drawn before it.

    Old log-probabilities and values are computed on them, so that the first ratio is 1 to the last bit: a matrix
    product rounds differently in another shape.
    """
    partition = minibatch_partition(config.seed, iteration, 0, config.local_batch_size, config.num_mini_batches)
    return [rows for minibatch in partition for rows in _cut(minibatch, prompt_ids, lengths, config, padded=padded)]


def generate_rollouts(
    state: TrainingState, reference_policy: PreTrainedModel, prompts: PromptDataset, config: PPOConfig
) -> Rollouts:
    """Sample a response to each prompt of the next iteration and compute its log-probabilities.

    Args:
        state: Training state; its policy samples.
        reference_policy: The frozen SFT policy.
        prompts: Training prompts.
        config: Hyperparameters.
    """
    started = time.perf_counter()
    iteration = state.iteration + 1
    chosen = episode_prompts(config.seed, iteration, config.prompts_per_batch, len(prompts))
    batch = prompts.select([index for index in chosen for _ in range(config.responses_per_prompt)])
    uniforms = episode_uniforms(config.seed, "rollout", iteration, config.batch_size, config.response_length)
    with autocast(config, state.device):
        generated = generate_responses(
            state.policy,
            batch.prompt_ids,
            uniforms,
            state.sampling,
            engine=config.rollout_engine,
            batch_size=config.local_rollout_forward_batch_size,
            recorded=state.recorded_steps,
        )
    return complete_rollouts(
        state,
        reference_policy,
        batch,
        generated,
        config,
        sampler_logprobs=generated.sampler_logprobs,
        started=started,
        generation_seconds=time.perf_counter() - started,
    )


def complete_rollouts(
    state: TrainingState,
    reference_policy: PreTrainedModel,
    prompts: PromptDataset,
    responses: Responses,
    config: PPOConfig,
    *,
    sampler_logprobs: Tensor | None,
    started: float,
    generation_seconds: float | None,
) -> Rollouts:
    """Compute what PPO compares of the next iteration's responses, under the policy that trains and the reference.

    Args:
        state: Training state.
        reference_policy: The frozen SFT policy.
        prompts: What the responses, row by row, answer.
        responses: `batch_size` responses, in as many columns as `response_length`.
        config: Hyperparameters.
        sampler_logprobs: `[B, T]` of the sampler, if it is known.
        started: `time.perf_counter()` when the iteration began.
        generation_seconds: How long the sampling took, if that is known.
    """
    sampled, iteration = time.perf_counter(), state.iteration + 1

    def reference() -> Tensor:
        with on_device(reference_policy, state.device), autocast(config, state.device):
            return response_logprobs(
                reference_policy,
                prompts.prompt_ids,
                responses.response_ids,
                responses.lengths,
                config.temperature,
                config.local_rollout_forward_batch_size,
                pad_token_id=state.sampling.pad_token_id,
            )

    tokens = sum(len(ids) for ids in prompts.prompt_ids) + int(responses.lengths.sum())
    two_lanes = tokens / config.num_mini_batches <= state.most_tokens_side_by_side
    if two_lanes:
        keep_apart(state.policy, reference_policy)
    with deterministic(config):
        reference_logprobs, (old_logprobs, entropy, values) = side_by_side(
            reference,
            lambda: _trained_forward(state, prompts.prompt_ids, responses, config, iteration),
            at_once=two_lanes,
        )
    return Rollouts(
        iteration=iteration,
        prompts=prompts,
        completions=state.tokenizer.batch_decode(responses.token_lists(), skip_special_tokens=True),
        response_ids=responses.response_ids,
        lengths=responses.lengths,
        terminated=responses.terminated,
        sampler_logprobs=sampler_logprobs,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        started=started,
        generation_seconds=generation_seconds,
        seconds=(generation_seconds or 0.0) + time.perf_counter() - sampled,
        values=values,
        padded=state.computes_padding,
        side_by_side=two_lanes,
    )


def _trained_forward(
    state: TrainingState,
    prompt_ids: list[list[int]],
    responses: Responses,
    config: PPOConfig,
    iteration: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities and entropies `[B, T]` of the same forward passes as the update's first epoch.

    Of a shared trunk the values `[B, T + 1]` too, else None.
    """
    shape = responses.response_ids.shape
    dtype = torch.float64 if state.policy.dtype == torch.float64 else torch.float32
    old_logprobs, entropy = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    values = torch.zeros(shape[0], shape[1] + 1, dtype=dtype) if state.shares_trunk else None
    with torch.no_grad():
        for rows in _first_epoch_micro_batches(
            config, iteration, prompt_ids, responses.lengths, padded=state.computes_padding
        ):
            packed = pack(
                [prompt_ids[i] for i in rows],
                responses.response_ids[rows],
                responses.lengths[rows],
                state.sampling.pad_token_id,
                state.device,
            )
            with autocast(config, state.device):
                found = response_statistics(state.policy, packed, config.temperature, with_entropy=True)
            scatter_rows(old_logprobs, rows, found.logprobs)
            scatter_rows(entropy, rows, cast(Tensor, found.entropy))
            if values is not None:
                scatter_rows(values, rows, response_values(state, packed, found.states))
    return old_logprobs, entropy, values
