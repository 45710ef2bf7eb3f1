"""Sampling without padding: its settings, its results, how one token is drawn, and the plain loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.core.responses import length_mask, response_lengths
from ppo_rlhf.core.sampling import sample_tokens
from ppo_rlhf.passes.decoding import Decoder
from ppo_rlhf.passes.sequences import without_padding
from ppo_rlhf.passes.token_rows import common_size

STEPS_BETWEEN_CHECKS = 16
"""On an accelerator the sampler checks every so many decoding steps which sequences have ended: a check forces a device
sync."""
ROWS_STEP = 16
"""On an accelerator the number of sequences decoded together is rounded up to a multiple of `ROWS_STEP`, while enough
sequences are left."""

Environment = Callable[[Any, list[list[int]], list[list[bool]]], list[list[int] | None]]
"""An environment takes the prompts of episodes (a `PromptDataset`), the tokens of each episode so far, and whether the
policy wrote each token. It returns the tokens of its reply to each episode, or None for an episode that is over."""


Engine = Callable[[PreTrainedModel, list[list[int]], "SamplingSettings"], "Responses"]
"""An engine samples a response to each prompt with another program, such as vLLM. Every process calls the engine, and
gets the responses to all prompts."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled. Lengths count the stop token; `top_k=0` and `top_p=1` switch the filters off.

    No stop token is drawn before token number `min_response_length` of a response or of a policy's turn. With an
    `environment` a response is an episode of several turns, and each turn of the policy has at most `turn_length`
    tokens. An `engine` such as vLLM samples instead of `passes.engines`, with noise of its own.
    """

    response_length: int
    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    min_response_length: int = 0
    environment: Environment | None = None
    turn_length: int | None = None
    engine: Engine | None = None
    unused_ids: tuple[range, ...] = ()
    """Ids of rows of the model's embedding that have no token (`tokenizers.unused_ids`), which are never drawn."""


@dataclass(frozen=True)
class Responses:
    """Responses to N prompts on the CPU, right-padded to `T = response_length`.

    Token ids are padded with the pad token, all other tensors with 0. `terminated` is True where a stop token ended the
    response; the stop token is then the response's last token. In a response of several turns, the environment's
    replies are between the policy's turns.
    """

    response_ids: Tensor  # [N, T] long
    lengths: Tensor  # [N] long
    terminated: Tensor  # [N] bool
    # [N, T] bool, True on tokens that the policy sampled; None: the policy sampled all tokens
    policy_mask: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    """`[N, T]`, the sampler's log-probabilities at the sampling temperature. `generate_responses` computes the
    log-probabilities before top-k, top-p and the exclusion of stop tokens and unused ids, an `Engine` such as vLLM
    afterwards. None if the user's script sampled the responses."""

    @property
    def mask(self) -> Tensor:
        """`[N, T]` bool, True on the tokens that the policy wrote; without an environment, all tokens but padding."""
        if self.policy_mask is None:
            return length_mask(self.lengths, self.response_ids.shape[1])
        return self.policy_mask

    def turns(self) -> Tensor:
        """Return the number of the policy's turns in each response, `[N]` long."""
        mask = self.mask
        return mask[:, 0] + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)

    def token_lists(self) -> list[list[int]]:
        """Return each response's tokens without padding."""
        return without_padding(self.response_ids, self.lengths)


def responses_of(tokens: Tensor, logprobs: Tensor, settings: SamplingSettings) -> Responses:
    """Return responses from tokens and log-probabilities `[N, T]`; entries after the first stop token are ignored."""
    lengths, terminated = response_lengths(tokens, settings.stop_token_ids)
    is_response = length_mask(lengths, settings.response_length)
    return Responses(
        torch.where(is_response, tokens, settings.pad_token_id),
        lengths,
        terminated,
        sampler_logprobs=torch.where(is_response, logprobs, 0.0),
    )


def decode_packed(
    model: PreTrainedModel, prompt_ids: list[list[int]], uniforms: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor]:
    """Prefill the prompts, then decode one token of each live sequence per step; ended sequences are dropped."""
    device, rows, width = model.device, len(prompt_ids), settings.response_length
    stops = torch.tensor(settings.stop_token_ids, dtype=torch.long, device=device)
    dtype = compute_dtype(model)
    tokens = torch.full((rows, width), settings.pad_token_id, device=device)
    logprobs = torch.zeros(rows, width, dtype=dtype, device=device)
    decoder = Decoder(model, prompt_ids, max(len(ids) for ids in prompt_ids) + width)
    live = torch.arange(rows, device=device)  # the row of each sequence that is still being decoded
    has_ended = torch.zeros(rows, dtype=torch.bool, device=device)
    logits = decoder.prefill()
    for step in range(width):
        token, logprob = sample_step(logits, uniforms[:, step][live], settings, may_stop(step, settings))
        tokens[live, step] = torch.where(has_ended, settings.pad_token_id, token)
        logprobs[live, step] = logprob
        if step + 1 == width:
            break
        has_ended = has_ended | torch.isin(token, stops)
        if _is_check_due(step, device):
            ended = has_ended.tolist()
            if all(ended):
                break
            if device.type != "cpu":
                ended = _rounded_to_few_sizes(ended)
            if any(ended):
                order = torch.tensor(decoder.drop(ended), device=device)
                live, token, has_ended = live[order], token[order], has_ended[order]
        logits = decoder.step(token)
    return tokens, logprobs


def _is_check_due(step: int, device: torch.device) -> bool:
    """Return whether to check after a decoding step which sequences have ended.

    On an accelerator a check forces a device sync, so it is due only every `STEPS_BETWEEN_CHECKS` steps.
    """
    return device.type == "cpu" or step % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1


def may_stop(step: int, settings: SamplingSettings) -> bool:
    """Return whether a stop token may be drawn in a step; steps count from 0."""
    return step >= settings.min_response_length - 1


def sample_step(logits: Tensor, noise: Tensor, settings: SamplingSettings, may_stop: bool) -> tuple[Tensor, Tensor]:
    """Draw a token for each row; return the tokens, and their log-probabilities under the unfiltered distribution."""
    wide, temperature = logits.to(compute_dtype(logits)), settings.temperature
    stops = () if may_stop else (range(index, index + 1) for index in settings.stop_token_ids)
    if not (excluded := (*settings.unused_ids, *stops)):
        return sample_tokens(wide, noise, temperature=temperature, top_k=settings.top_k, top_p=settings.top_p)
    kept = wide.clone()
    # Slice one range after the other, because indexing with a list copies the list to the device
    for ids in excluded:
        kept[:, ids.start : ids.stop].fill_(-torch.inf)
    tokens, _ = sample_tokens(kept, noise, temperature=temperature, top_k=settings.top_k, top_p=settings.top_p)
    return tokens, token_logprobs(wide[:, None], tokens[:, None], temperature)[:, 0]


def _rounded_to_few_sizes(ended: list[bool]) -> list[bool]:
    """Select the ended sequences to drop; some ended sequences stay, to make the batch a multiple of `ROWS_STEP`.

    Returns:
        True for each sequence to drop.
    """
    live = len(ended) - sum(ended)
    kept_count = min(len(ended), common_size(live, ROWS_STEP)) - live
    kept = [row for row, has_ended in enumerate(ended) if has_ended][:kept_count]
    return [has_ended and row not in kept for row, has_ended in enumerate(ended)]
