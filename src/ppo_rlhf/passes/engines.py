"""Sampling of responses from a causal language model with given noise.

The rollout engines `static` and `hf` give the same tokens for the same uniforms. The engine `static` decodes without
padding and drops sequences that have ended. The engine `hf` is transformers' `generate` with transformers' attention
and KV cache; a logits processor draws the tokens. The tests compare the tokens of `static` with the tokens of `hf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StaticCache

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.passes.capabilities import argument_of
from ppo_rlhf.passes.compilation import compiles
from ppo_rlhf.passes.decoding import decodes
from ppo_rlhf.passes.free_memory import sequences_at_a_time
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.packed_attention import padded_attention
from ppo_rlhf.passes.prefixes import in_passes_alike
from ppo_rlhf.passes.rows import in_passes
from ppo_rlhf.passes.sampling import Responses, SamplingSettings, decode_packed, may_stop, responses_of, sample_step
from ppo_rlhf.passes.token_rows import filled_size


def generate_responses(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    engine: str = "static",
    batch_size: int | None = 64,
    halving: Halving | None = None,
) -> Responses:
    """Sample one response to each prompt by inverse-CDF sampling with the given uniforms.

    Args:
        model: A causal language model with dropout off.
        prompt_ids: N prompts of at least one token; N may be 0.
        uniforms: `[N, T]` float64 in [0, 1), one for each response and step.
        settings: How responses are sampled.
        engine: `static` or `hf`; `hf` decodes architectures that need padding in any case.
        batch_size: Prompts decoded at a time, which changes tokens only by rounding; None: as many as fit into memory.
        halving: Halves `batch_size` when memory runs out; None: this call's own.
    """
    longest = max((len(ids) for ids in prompt_ids), default=0)
    dtype = compute_dtype(model)
    tokens = torch.full((len(prompt_ids), settings.response_length), settings.pad_token_id)
    logprobs = torch.zeros(tokens.shape, dtype=dtype)
    with torch.no_grad():
        decode = _decode_with_generate if engine == "hf" or not decodes(model) else decode_packed
        if batch_size is None:
            columns = longest + settings.response_length
            batch_size = sequences_at_a_time(model, len(prompt_ids), columns, decoded_from=longest)

        def decoded(groups: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in groups:
                prompts, noise = [prompt_ids[row] for row in rows], uniforms[rows].to(model.device)
                drawn, drawn_logprobs = decode(model, prompts, noise, settings)
                yield drawn.to(tokens), drawn_logprobs.to(logprobs)

        in_order = list(range(len(prompt_ids)))
        if decode is decode_packed:
            in_order = in_passes_alike(in_order, prompt_ids, batch_size)
        for rows, (drawn, drawn_logprobs) in in_passes(in_order, batch_size, decoded, halving):
            tokens[rows, : drawn.shape[1]] = drawn
            logprobs[rows, : drawn.shape[1]] = drawn_logprobs
    return responses_of(tokens, logprobs, settings)


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
