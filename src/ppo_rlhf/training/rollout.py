"""One iteration's rollouts: responses to a batch of prompts, with the log-probabilities that PPO compares."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.core.logprobs import token_entropy, token_logprobs
from ppo_rlhf.core.responses import length_mask
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.generation import GeneratedResponses, generate_responses
from ppo_rlhf.training.packing import PackedSequences, pack, without_padding
from ppo_rlhf.training.prompts import PromptDataset
from ppo_rlhf.training.randomness import episode_prompts, episode_uniforms, micro_batches, minibatch_partition
from ppo_rlhf.training.rewards import ResponseBatch
from ppo_rlhf.training.scoring import response_logits, response_logprobs, scatter_rows
from ppo_rlhf.training.state import TrainingState


@dataclass(frozen=True)
class Rollouts:
    """B responses of width T; tensors lie on the CPU, log-probabilities and entropy are in nats and 0 in padding."""

    iteration: int  # the iteration that these belong to, from 1
    prompts: PromptDataset  # B rows
    completions: list[str]  # decoded without special tokens
    response_ids: Tensor  # [B, T] long
    lengths: Tensor  # [B] long
    terminated: Tensor  # [B] bool, True where a stop token ended the response
    sampler_logprobs: Tensor  # [B, T], the decoding loop's own
    old_logprobs: Tensor  # [B, T], of the forward that is trained
    reference_logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T], of the tempered policy
    started: float  # time.perf_counter() when the iteration began
    generation_seconds: float
    seconds: float

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

    def pack(self, rows: list[int], pad_token_id: int, device: torch.device) -> PackedSequences:
        """Return the given rows as model inputs, trimmed to their longest prompt and response."""
        prompt_ids = [self.prompts.prompt_ids[i] for i in rows]
        return pack(prompt_ids, self.response_ids[rows], self.lengths[rows], pad_token_id, device)


def first_epoch_micro_batches(config: PPOConfig, iteration: int) -> list[list[int]]:
    """Return the micro-batches that the update's first epoch will use.

    Old log-probabilities and values are computed on them, so that the first ratio is 1 to the last bit: a matrix
    product rounds differently in another shape.
    """
    partition = minibatch_partition(config.seed, iteration, 0, config.local_batch_size, config.num_mini_batches)
    return [rows for minibatch in partition for rows in micro_batches(minibatch, config.local_micro_batch_size)]


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
    batch = prompts.select(episode_prompts(config.seed, iteration, config.batch_size, len(prompts)))
    uniforms = episode_uniforms(config.seed, "rollout", iteration, config.batch_size, config.response_length)
    generated = generate_responses(
        state.policy,
        batch.prompt_ids,
        uniforms,
        state.sampling,
        engine=config.rollout_engine,
        batch_size=config.local_rollout_forward_batch_size,
    )
    generation_seconds = time.perf_counter() - started
    reference_logprobs = response_logprobs(
        reference_policy,
        batch.prompt_ids,
        generated.response_ids,
        generated.lengths,
        config.temperature,
        config.local_rollout_forward_batch_size,
        pad_token_id=state.sampling.pad_token_id,
    )
    old_logprobs, entropy = _trained_forward(state, batch.prompt_ids, generated, config, iteration)
    return Rollouts(
        iteration=iteration,
        prompts=batch,
        completions=state.tokenizer.batch_decode(generated.token_lists(), skip_special_tokens=True),
        response_ids=generated.response_ids,
        lengths=generated.lengths,
        terminated=generated.terminated,
        sampler_logprobs=generated.sampler_logprobs,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        started=started,
        generation_seconds=generation_seconds,
        seconds=time.perf_counter() - started,
    )


def _trained_forward(
    state: TrainingState,
    prompt_ids: list[list[int]],
    generated: GeneratedResponses,
    config: PPOConfig,
    iteration: int,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies `[B, T]` of the same forward passes as the update's first epoch."""
    shape = generated.response_ids.shape
    dtype = torch.float64 if state.policy.dtype == torch.float64 else torch.float32
    old_logprobs, entropy = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    with torch.no_grad():
        for rows in first_epoch_micro_batches(config, iteration):
            packed = pack(
                [prompt_ids[i] for i in rows],
                generated.response_ids[rows],
                generated.lengths[rows],
                state.sampling.pad_token_id,
                state.device,
            )
            logits = response_logits(state.policy, packed)
            logprobs = token_logprobs(logits, packed.response_ids, config.temperature)
            entropies = token_entropy(logits, config.temperature)
            scatter_rows(old_logprobs, rows, torch.where(packed.is_response, logprobs, 0.0))
            scatter_rows(entropy, rows, torch.where(packed.is_response, entropies, 0.0))
    return old_logprobs, entropy
