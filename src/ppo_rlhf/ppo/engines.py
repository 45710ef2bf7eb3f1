"""Sampling of responses from a causal language model with given noise.

The rollout engines `static` and `hf` give the same tokens for the same uniforms. The engine `static` decodes without
padding and drops sequences that have ended. The engine `hf` is transformers' `generate` with transformers' attention
and KV cache; a logits processor draws the tokens. The tests compare the tokens of `static` with the tokens of `hf`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StaticCache

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.core.responses import length_mask, response_lengths
from ppo_rlhf.core.sampling import sample_tokens
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.capabilities import argument_of
from ppo_rlhf.models.captures import DECODING, Captures
from ppo_rlhf.models.compilation import compiles
from ppo_rlhf.models.decoding import Decoder, decodes
from ppo_rlhf.models.free_memory import sequences_at_a_time
from ppo_rlhf.models.packed_attention import padded_attention
from ppo_rlhf.models.token_rows import common_size, filled_size
from ppo_rlhf.ppo.sequences import without_padding

STEPS_BETWEEN_CHECKS = 16
"""On an accelerator the sampler checks every so many decoding steps which sequences have ended: a check forces a device
sync."""
ROWS_STEP = 16
"""On an accelerator the number of sequences decoded together is rounded up to a multiple of `ROWS_STEP`, while enough
sequences are left."""

Environment = Callable[[PromptDataset, list[list[int]], list[list[bool]]], list[list[int] | None]]
"""An environment takes the prompts of episodes, the tokens of each episode so far, and whether the policy wrote each
token. An environment returns the tokens of its reply to each episode, or None for an episode that is over."""


Engine = Callable[[PreTrainedModel, list[list[int]], "SamplingSettings"], "Responses"]
"""An engine samples a response to each prompt with another program, such as vLLM. Every process calls the engine, and
gets the responses to all prompts."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled. Lengths count the stop token; `top_k=0` and `top_p=1` switch the filters off.

    No stop token is drawn before token number `min_response_length` of a response or of a policy's turn. With an
    `environment` a response is an episode of several turns, and each turn of the policy has at most `turn_length`
    tokens. An `engine` such as vLLM samples instead of `ppo.engines`, with noise of its own.
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


def generate_responses(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    engine: str = "static",
    batch_size: int | None = 64,
    captures: Captures | None = None,
) -> Responses:
    """Sample one response to each prompt by inverse-CDF sampling with the given uniforms.

    Args:
        model: A causal language model with dropout off.
        prompt_ids: N prompts of at least one token; N may be 0.
        uniforms: `[N, T]` float64 in [0, 1), one for each response and step.
        settings: How responses are sampled.
        engine: `static` or `hf`; `hf` decodes architectures that need padding in any case.
        batch_size: Prompts decoded at a time, which changes tokens only by rounding; None: as many as fit into memory.
        captures: The CUDA graphs of the decoding steps of `static`, used if the model can be captured. With CUDA graphs
            the size of the decoding buffers limits the batch size, too.
    """
    longest = max((len(ids) for ids in prompt_ids), default=0)
    dtype = compute_dtype(model)
    tokens = torch.full((len(prompt_ids), settings.response_length), settings.pad_token_id)
    logprobs = torch.zeros(tokens.shape, dtype=dtype)
    with torch.no_grad():
        decode = _decode_with_generate if generates(model, engine) else decode_packed
        columns, used_again, most = longest + settings.response_length, 0, None
        if captures is not None and captures.serves(DECODING) and decode is decode_packed:
            # Imported inside the function because captured_sampling imports ppo.engines, and is not needed on a CPU
            from ppo_rlhf.ppo import captured_sampling

            if not captured_sampling.why_not_captured(model):
                decode = partial(captured_sampling.decode_captured, captures=captures)
                columns, used_again = captured_sampling.columns_of(columns), captured_sampling.held_bytes(captures)
                most = captured_sampling.most_rows(model, columns)
        if batch_size is None:
            sizes: dict[str, Any] = {"decoded_from": longest, "used_again": used_again, "most": most}
            batch_size = sequences_at_a_time(model, len(prompt_ids), columns, **sizes)
        elif most is not None:
            batch_size = min(batch_size, most)
        for start in range(0, len(prompt_ids), batch_size):
            noise = uniforms[start : start + batch_size].to(model.device)
            drawn, drawn_logprobs = decode(model, prompt_ids[start : start + batch_size], noise, settings)
            region = slice(start, start + batch_size), slice(drawn.shape[1])
            tokens[region], logprobs[region] = drawn.cpu(), drawn_logprobs.cpu()
    return responses_of(tokens, logprobs, settings)


def generates(model: PreTrainedModel, engine: str) -> bool:
    """Return whether transformers' `generate` decodes a model: with `hf`, or if `static` cannot decode the model."""
    return engine == "hf" or not decodes(model)


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
        if is_check_due(step, device):
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


def is_check_due(step: int, device: torch.device) -> bool:
    """Return whether to check after a decoding step which sequences have ended.

    On an accelerator a check forces a device sync, so it is due only every `STEPS_BETWEEN_CHECKS` steps.
    """
    return device.type == "cpu" or step % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1


def _rounded_to_few_sizes(ended: list[bool]) -> list[bool]:
    """Select the ended sequences to drop; some ended sequences stay, to make the batch a multiple of `ROWS_STEP`.

    Returns:
        True for each sequence to drop.
    """
    live = len(ended) - sum(ended)
    kept_count = min(len(ended), common_size(live, 16, ROWS_STEP)) - live
    kept = [row for row, has_ended in enumerate(ended) if has_ended][:kept_count]
    return [has_ended and row not in kept for row, has_ended in enumerate(ended)]


class _ForcedSampling(LogitsProcessor):
    """Draws a token, and sets the logits of all other tokens to -inf, so that greedy search takes the drawn token."""

    def __init__(self, uniforms: Tensor, settings: SamplingSettings) -> None:
        self.uniforms = uniforms
        self.settings = settings
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.logprobs)
        token, logprob = sample_step(scores, self.uniforms[:, step], self.settings, may_stop(step, self.settings))
        self.logprobs.append(logprob)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


class _Cache(StaticCache):
    """A static KV cache that casts keys to the values' dtype: under autocast rotary embeddings return float32 keys."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


# Number of columns of the widest KV cache that each model has needed so far
_widest: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def _cache(model: PreTrainedModel, columns: int) -> dict[str, Any]:
    """Return the arguments that give `generate` a static KV cache, as wide as the model's widest KV cache so far.

    The width never shrinks, because torch.compile compiles the decoding step again for each width.
    """
    # transformers up to 5.23 names the argument with the KV cache `past_key_values`
    name = argument_of(model, "cache", "past_key_values")
    if name is None:
        return {"cache_implementation": "static"}
    _widest[model] = max(columns, _widest.get(model, 0))
    return {name: _Cache(model.config, _widest[model])}


def _prompt_width(longest: int, device: torch.device) -> int:
    """Return the padded width of the prompts; on an accelerator, whose compiler compiles each width, one of few."""
    return longest if device.type == "cpu" else filled_size(longest)


def _decode_with_generate(
    model: PreTrainedModel, prompt_ids: list[list[int]], uniforms: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor]:
    device, longest = model.device, max(len(ids) for ids in prompt_ids)
    width = _prompt_width(longest, device)
    padded = [[settings.pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    sampler = _ForcedSampling(uniforms, settings)
    plain = GenerationConfig(
        do_sample=False,
        max_new_tokens=settings.response_length,
        pad_token_id=settings.pad_token_id,
        eos_token_id=list(settings.stop_token_ids) or None,
        disable_compile=device.type != "cpu" and not compiles(device),
    )
    # Generate with a plain configuration, because the model's own may set penalties, top_p and the like
    saved, model.generation_config = model.generation_config, plain
    try:
        with padded_attention(model):
            sequences: Tensor = model.generate(  # type: ignore[operator]
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                logits_processor=LogitsProcessorList([sampler]),
                # On a GPU transformers compiles the decoding step and uses CUDA graphs
                **_cache(model, width + settings.response_length),
            )
    finally:
        model.generation_config = saved
        # Remove the compiled call, because a copy of the model would keep it and call the original model
        vars(model).pop("_compiled_call", None)
    return sequences[:, width:], torch.stack(sampler.logprobs, dim=1)


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
