"""One iteration's rollouts: responses to a batch of prompts, with the log-probabilities that PPO compares."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms
from ppo_rlhf.core.statistics import masked_mean
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.forward import backbone_of, hidden_states_at
from ppo_rlhf.models.offloading import on_device
from ppo_rlhf.models.transfers import to_device
from ppo_rlhf.ppo.batch import Epochs, SequenceBatch, cut_batch, first_epoch, make_batch
from ppo_rlhf.ppo.episodes import sample_episodes, turn_texts
from ppo_rlhf.ppo.logprobs import PolicyOutput, filled_rows, response_statistics
from ppo_rlhf.ppo.precision import autocast, deterministic
from ppo_rlhf.ppo.sampling import Responses, SamplingSettings, generate_responses
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import gather_rows, gather_scattered, own_share
from ppo_rlhf.rewards.rendering import conversations
from ppo_rlhf.rewards.scoring import ResponseBatch

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

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, True on the response tokens that the policy wrote."""
        return self.responses.mask

    @property
    def logprob_gap(self) -> Tensor | None:
        """Mean distance of the sampler's log-probabilities from `old_logprobs`; None if they were sampled elsewhere."""
        sampled, old = self.responses.sampler_logprobs, self.old_logprobs
        return None if sampled is None else masked_mean((sampled.to(old.dtype) - old).abs(), self.mask)

    def sequences(self, groups: list[list[int]], pad_token_id: int, device: torch.device) -> list[SequenceBatch]:
        """Return each group of rows as model inputs for a device, on the CPU; see `sequences`."""
        return sequences(self.prompts.prompt_ids, self.responses, groups, pad_token_id, device)


def generate_rollouts(
    state: TrainingState, reference_policy: PreTrainedModel, prompts: PromptDataset, config: PPOConfig
) -> Rollouts:
    """Sample a response to each prompt of the next iteration and compute its log-probabilities.

    Every process returns the rollouts of all of them.

    Raises:
        TrainingError: An engine is gone, or holds other weights than the policy's.
    """
    started = time.perf_counter()
    iteration = state.iteration + 1
    chosen = episode_prompts(config.seed, iteration, config.prompts_per_batch, len(prompts))
    chosen_prompts = prompts.select([index for index in chosen for _ in range(config.responses_per_prompt)])
    uniforms = episode_uniforms(config.seed, "rollout", iteration, config.batch_size, config.response_length)
    responses = sample_responses(
        state.policy,
        chosen_prompts,
        uniforms,
        state.sampling,
        config,
        batch_size=config.local_rollout_forward_batch_size,
    )
    rollouts = complete_rollouts(
        state,
        reference_policy,
        chosen_prompts,
        responses,
        config,
        started=started,
        generation_seconds=time.perf_counter() - started,
    )
    if state.sampling.engine is not None:
        check_weights(rollouts, state.history)
    return rollouts


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


def sample_responses(
    policy: PreTrainedModel,
    prompts: PromptDataset,
    uniforms: Tensor,
    sampling: SamplingSettings,
    config: PPOConfig,
    *,
    batch_size: int,
) -> Responses:
    """Sample a response to each of N prompts; each process samples its own share, and all get all of them.

    With an environment a response has several turns. `sampling.engine` does all this by itself, without `uniforms`.

    Args:
        policy: A causal language model.
        prompts: N prompts.
        uniforms: `[N, T]` float64 in [0, 1): the noise.
        sampling: How tokens are drawn.
        config: Engine and precision.
        batch_size: Responses decoded at a time.
    """
    if sampling.engine is not None:
        return sampling.engine(policy, prompts.prompt_ids, sampling)
    share = own_share(len(prompts))
    noise = uniforms[share.start : share.stop]
    own_prompts = prompts.select(share)
    engine = config.rollout_engine
    with autocast(config, policy.device):
        if sampling.environment is None:
            own = generate_responses(
                policy, own_prompts.prompt_ids, noise, sampling, engine=engine, batch_size=batch_size
            )
        else:
            own = sample_episodes(policy, own_prompts, noise, sampling, engine=engine, batch_size=batch_size)
    return Responses(
        gather_rows(own.response_ids),
        gather_rows(own.lengths),
        gather_rows(own.terminated),
        None if own.policy_mask is None else gather_rows(own.policy_mask),
        None if own.sampler_logprobs is None else gather_rows(own.sampler_logprobs),
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

    Args:
        state: Training state.
        reference_policy: The frozen SFT policy.
        prompts: The prompt of each response.
        responses: `batch_size` responses, in as many columns as `response_length`.
        config: Hyperparameters.
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
        old_logprobs, entropy, values = _first_forward(state, prompts, responses, epochs)
    return Rollouts(
        iteration=state.iteration + 1,
        prompts=prompts,
        responses=responses,
        texts=response_batch(prompts, responses, state.tokenizer),
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        entropy=entropy,
        values=values,
        epochs=epochs,
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
    batch_size: int,
    pad_token_id: int,
) -> Tensor:
    """Return the log-probabilities `[N, T]` of the policy's tokens under a model, 0 elsewhere.

    Each process computes its share, without gradients. Rows of similar length go together, so that models that need
    padding compute little of it.

    Args:
        model: A causal language model with dropout off. An offloaded one is on the device during the call.
        prompt_ids: N prompts as token ids.
        responses: The response to each.
        config: Precision.
        temperature: Divides the logits.
        device: Where the model computes.
        batch_size: Responses in one forward pass.
        pad_token_id: Any id inside the vocabulary; its value has no effect.
    """
    share, lengths = own_share(len(prompt_ids)), responses.lengths
    by_length = sorted(share, key=lambda row: len(prompt_ids[row]) + int(lengths[row]))
    groups = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    found: list[Tensor] = []
    with torch.no_grad(), on_device(model, device), autocast(config, device):
        for batch in to_device(sequences(prompt_ids, responses, groups, pad_token_id, device), device):
            states = hidden_states_at(backbone_of(model), batch.rows, batch.state_positions)
            found.append(response_statistics(model, batch, states, temperature)[0])
    logprobs = filled_rows(len(prompt_ids), responses.response_ids.shape[1], groups, found, dtype)
    return torch.where(responses.mask, gather_rows(logprobs[share.start : share.stop]), 0.0)


def sequences(
    prompt_ids: list[list[int]],
    responses: Responses,
    groups: list[list[int]],
    pad_token_id: int,
    device: torch.device,
) -> list[SequenceBatch]:
    """Return each group of rows as model inputs, trimmed to the longest of the group; `to_device` copies all of them.

    For an accelerator they are filled up, so that few shapes occur.
    """
    return [
        make_batch(
            [prompt_ids[row] for row in rows],
            responses.response_ids[rows],
            responses.lengths[rows],
            pad_token_id,
            fill=device.type != "cpu",
        )
        for rows in groups
    ]


def _first_forward(
    state: TrainingState, prompts: PromptDataset, responses: Responses, epochs: Epochs
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities and entropies `[B, T]` of the forward passes that the update's first epoch repeats.

    They are 0 on all tokens but the policy's. With a shared trunk the values `[B, T + 1]` too, else None.
    """
    rows, width = responses.response_ids.shape
    groups = first_epoch(epochs)
    mine = [row for group in groups for row in group]
    forward = state.accelerator.unwrap_model(state.policy_forward)
    outputs: list[PolicyOutput] = []
    batches = sequences(prompts.prompt_ids, responses, groups, state.sampling.pad_token_id, state.device)
    with torch.no_grad():
        for batch in to_device(batches, state.device):
            with autocast(state.config, state.device):
                outputs.append(forward(batch, with_entropy=True))

    def of_all(name: str, columns: int) -> Tensor:
        found = filled_rows(rows, columns, groups, [getattr(out, name) for out in outputs], state.statistics_dtype)
        return gather_scattered(found, mine)

    return (
        torch.where(responses.mask, of_all("logprobs", width), 0.0),
        torch.where(responses.mask, of_all("entropy", width), 0.0),
        of_all("values", width + 1) if state.shares_trunk else None,
    )
