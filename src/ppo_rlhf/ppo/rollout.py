"""One iteration's rollouts: responses to a batch of prompts, with the log-probabilities that PPO compares."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms
from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.models.offloading import on_device
from ppo_rlhf.ppo.batch import SequenceBatch, make_batch, without_padding
from ppo_rlhf.ppo.episodes import Environment, sample_episodes, turn_texts
from ppo_rlhf.ppo.logprobs import fill_rows, response_logprobs
from ppo_rlhf.ppo.minibatches import Epochs, cut_batch
from ppo_rlhf.ppo.precision import autocast, deterministic
from ppo_rlhf.ppo.sampling import (
    GeneratedResponses,
    Responses,
    SamplingSettings,
    generate_responses,
    policy_tokens,
)
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import from_all, gather_rows, own_share
from ppo_rlhf.rewards.functions import load_function
from ppo_rlhf.rewards.scorers import ResponseBatch


@dataclass(frozen=True)
class Rollouts:
    """B responses of width T, of all processes; log-probabilities and entropy are in nats.

    They are 0 in padding and on tokens of an environment. Tensors lie on the CPU.
    """

    iteration: int  # of these rollouts, from 1
    prompts: PromptDataset  # B rows
    completions: list[str]  # decoded without special tokens
    response_ids: Tensor  # [B, T] long
    lengths: Tensor  # [B] long
    terminated: Tensor  # [B] bool, True where a stop token ended the response
    sampler_logprobs: Tensor | None  # [B, T], of the decoding loop; None if the responses were sampled elsewhere
    old_logprobs: Tensor  # [B, T], of the forward pass that is trained
    reference_logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T], of the tempered policy
    epochs: Epochs  # the minibatches of every epoch of the update
    started: float  # time.perf_counter() when the iteration began
    generation_seconds: float | None  # None if the responses were sampled elsewhere
    seconds: float
    values: Tensor | None = None  # [B, T + 1], of the same forward passes, if policy and critic share their trunk
    policy_mask: Tensor | None = None  # [B, T] bool, as in Responses
    turns: list[list[str]] = field(default_factory=list)  # as in ResponseBatch

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, True on the response tokens that the policy wrote."""
        return policy_tokens(self.lengths, self.response_ids, self.policy_mask)

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
            turns=self.turns,
            policy_mask=self.policy_mask,
        )

    def first_epoch(self) -> list[list[int]]:
        """Return the micro-batches of the update's first epoch that this process computes."""
        return [rows for minibatch in self.epochs[0] for rows in minibatch.micro_batches]

    def sequences(self, rows: list[int], pad_token_id: int, device: torch.device) -> SequenceBatch:
        """Return the given rows as model inputs, trimmed to the longest of them."""
        prompt_ids = [self.prompts.prompt_ids[row] for row in rows]
        return make_batch(prompt_ids, self.response_ids[rows], self.lengths[rows], pad_token_id, device)


def generate_rollouts(
    state: TrainingState, reference_policy: PreTrainedModel, prompts: PromptDataset, config: PPOConfig
) -> Rollouts:
    """Sample a response to each prompt of the next iteration and compute its log-probabilities.

    Every process returns the rollouts of all of them.

    Args:
        state: Training state; its policy samples.
        reference_policy: The frozen SFT policy.
        prompts: Training prompts.
        config: Hyperparameters.
    """
    started = time.perf_counter()
    iteration = state.iteration + 1
    chosen = episode_prompts(config.seed, iteration, config.prompts_per_batch, len(prompts))
    chosen_prompts = prompts.select([index for index in chosen for _ in range(config.responses_per_prompt)])
    uniforms = episode_uniforms(config.seed, "rollout", iteration, config.batch_size, config.response_length)
    responses = sample_responses(
        state.policy,
        state.tokenizer,
        chosen_prompts,
        uniforms,
        state.sampling,
        config,
        batch_size=config.local_rollout_forward_batch_size,
    )
    return complete_rollouts(
        state,
        reference_policy,
        chosen_prompts,
        responses,
        config,
        sampler_logprobs=responses.sampler_logprobs,
        started=started,
        generation_seconds=time.perf_counter() - started,
    )


def sample_responses(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    uniforms: Tensor,
    sampling: SamplingSettings,
    config: PPOConfig,
    *,
    batch_size: int,
) -> GeneratedResponses:
    """Sample a response to each of N prompts; each process samples its own share, and all get all of them.

    With `ppo.environment` a response has several turns.

    Args:
        policy: A causal language model.
        tokenizer: The policy's.
        prompts: N prompts.
        uniforms: `[N, T]` float64 in [0, 1): the noise.
        sampling: How tokens are drawn.
        config: Engine and precision.
        batch_size: Responses decoded at a time.
    """
    share = own_share(len(prompts))
    noise = uniforms[share.start : share.stop]
    own_prompts = prompts.select(share)
    engine = config.rollout_engine
    with autocast(config, policy.device):
        if config.environment is None or config.turn_length is None:
            own = generate_responses(
                policy, own_prompts.prompt_ids, noise, sampling, engine=engine, batch_size=batch_size
            )
        else:
            own = sample_episodes(
                policy,
                Environment(load_function(config.environment), config.environment, tokenizer),
                own_prompts,
                noise,
                sampling,
                config.turn_length,
                engine=engine,
                batch_size=batch_size,
            )
    return GeneratedResponses(
        gather_rows(own.response_ids),
        gather_rows(own.lengths),
        gather_rows(own.terminated),
        None if own.policy_mask is None else gather_rows(own.policy_mask),
        sampler_logprobs=gather_rows(own.sampler_logprobs),
    )


def response_batch(prompts: PromptDataset, responses: Responses, tokenizer: PreTrainedTokenizerBase) -> ResponseBatch:
    """Return responses to N prompts as rewards take them."""
    response_ids = responses.token_lists()
    return ResponseBatch(
        prompts=prompts.texts,
        completions=tokenizer.batch_decode(response_ids, skip_special_tokens=True),
        columns=prompts.columns,
        prompt_ids=prompts.prompt_ids,
        response_ids=response_ids,
        terminated=responses.terminated.tolist(),
        turns=turn_texts(responses, tokenizer),
        policy_mask=responses.policy_mask,
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
    """Compute the log-probabilities of the next iteration's responses under the policy that trains and the reference.

    Args:
        state: Training state.
        reference_policy: The frozen SFT policy.
        prompts: The prompt of each response.
        responses: `batch_size` responses, in as many columns as `response_length`.
        config: Hyperparameters.
        sampler_logprobs: `[B, T]` of the sampler, if they are known.
        started: `time.perf_counter()` when the iteration began.
        generation_seconds: Duration of the sampling, if it is known.
    """
    sampled = time.perf_counter()
    epochs = cut_batch(
        config,
        state.iteration + 1,
        [len(ids) for ids in prompts.prompt_ids],
        responses.lengths.tolist(),
        padded=state.computes_padding,
    )
    blank = torch.zeros(responses.response_ids.shape, dtype=state.statistics_dtype)
    texts = response_batch(prompts, responses, state.tokenizer)
    rollouts = Rollouts(
        iteration=state.iteration + 1,
        prompts=prompts,
        completions=texts.completions,
        policy_mask=responses.policy_mask,
        turns=texts.turns,
        response_ids=responses.response_ids,
        lengths=responses.lengths,
        terminated=responses.terminated,
        sampler_logprobs=sampler_logprobs,
        old_logprobs=blank,
        reference_logprobs=blank,
        entropy=blank,
        epochs=epochs,
        started=started,
        generation_seconds=generation_seconds,
        seconds=0.0,
    )
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
        old_logprobs, entropy, values = _first_forward(state, rollouts, config)
    return replace(
        rollouts,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        values=values,
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
    batch_size: int,
    pad_token_id: int,
) -> Tensor:
    """Return the log-probabilities `[N, T]` of the policy's tokens under a model, 0 elsewhere.

    Each process computes its share.

    Args:
        model: A causal language model; one that waits in the host's memory is moved to the device for as long.
        prompt_ids: N prompts as token ids.
        responses: The response to each.
        config: Precision.
        temperature: Divides the logits.
        device: Where the model computes.
        batch_size: Responses in one forward pass.
        pad_token_id: Any id inside the vocabulary.
    """
    share = own_share(len(prompt_ids))
    with on_device(model, device), autocast(config, device):
        own = response_logprobs(
            model,
            prompt_ids[share.start : share.stop],
            responses.response_ids[share.start : share.stop],
            responses.lengths[share.start : share.stop],
            temperature,
            batch_size,
            pad_token_id=pad_token_id,
        )
    return torch.where(responses.mask, gather_rows(own), 0.0)


def _first_forward(state: TrainingState, rollouts: Rollouts, config: PPOConfig) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities and entropies `[B, T]` of the forward passes that the update's first epoch repeats.

    They are 0 on all tokens but the policy's. With a shared trunk the values `[B, T + 1]` too, else None.
    """
    rows, width = rollouts.response_ids.shape
    logprobs, entropy = (torch.zeros(rows, width, dtype=state.statistics_dtype) for _ in range(2))
    values = torch.zeros(rows, width + 1, dtype=state.statistics_dtype) if state.shares_trunk else None
    forward = state.accelerator.unwrap_model(state.policy_forward)
    with torch.no_grad():
        for group in rollouts.first_epoch():
            batch = rollouts.sequences(group, state.sampling.pad_token_id, state.device)
            with autocast(config, state.device):
                output = forward(batch, with_entropy=True)
            fill_rows(logprobs, group, output.logprobs)
            fill_rows(entropy, group, output.entropy)
            if values is not None:
                fill_rows(values, group, output.values)
    mine = [row for group in rollouts.first_epoch() for row in group]
    return (
        torch.where(rollouts.mask, gather_scattered(logprobs, mine), 0.0),
        torch.where(rollouts.mask, gather_scattered(entropy, mine), 0.0),
        None if values is None else gather_scattered(values, mine),
    )


def gather_scattered(values: Tensor, own_rows: list[int]) -> Tensor:
    """Return `[B, …]` with each row from the process that computed it.

    Args:
        values: `[B, …]`, computed in `own_rows`.
        own_rows: Rows of this process; each row is one process's.
    """
    gathered = values.clone()
    for rows, found in from_all((own_rows, values[own_rows])):
        gathered[rows] = found
    return gathered
