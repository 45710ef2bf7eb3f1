"""Samples the same tokens as `ppo.sampling`, but replays a CUDA graph for each decoding step."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.core.logprobs import card_bytes
from ppo_rlhf.models.capabilities import PROBE_ERRORS, are_close, probe_ids, probed_once
from ppo_rlhf.models.captures import DECODING, Captures, fixed_state
from ppo_rlhf.models.common_sizes import buffer_rows, captured_columns, captured_rows
from ppo_rlhf.models.decoding_in_place import InPlaceDecoder, rows_kept
from ppo_rlhf.models.free_memory import number_bytes
from ppo_rlhf.ppo import sampling
from ppo_rlhf.ppo.sampling import SamplingSettings

log = logging.getLogger(__name__)


class CapturedSampler:
    """Samples responses with CUDA graphs; one sampler serves many batches and different sampling settings."""

    def __init__(self, model: PreTrainedModel, rows: int, columns: int, length: int) -> None:
        """Allocate buffers for `rows` sequences of `columns` tokens, of which a response has at most `length`."""
        device = model.device
        dtype = compute_dtype(model)
        self.decoder, self.length = InPlaceDecoder(model, rows, columns), length
        self.uniforms = torch.zeros(rows, length, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, length, dtype=dtype, device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)  # the last sampled token of each sequence
        self.result_rows = torch.arange(rows, device=device)  # the row of each sequence in the tensors of results
        self.has_ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)  # number of the decoding step, counted from 0
        self.live = rows  # number of sequences that are still decoded; they are in the buffers' first rows
        self._model, self._fixed, self._autocast = model, fixed_state(model), _autocast_now(device)
        self._stops: dict[tuple[int, ...], Tensor] = {}  # stop token ids as tensors on the device, by the tuple of ids

    @property
    def bytes(self) -> int:
        """Bytes of the decoding buffers and of the KV cache."""
        buffers = (self.uniforms, self.tokens, self.logprobs, self.token, self.result_rows, self.has_ended)
        return self.decoder.bytes + sum(buffer.nbytes for buffer in buffers)

    def is_of(self, model: PreTrainedModel) -> bool:
        """Return whether the CUDA graphs fit a model: its `fixed_state` and autocast's dtype are unchanged."""
        is_same = self._model is model and self._autocast == _autocast_now(model.device)
        return is_same and self._fixed == fixed_state(model)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sampler's capacity: number of sequences, tokens per sequence, tokens per response."""
        return self.decoder.rows, self.decoder.columns, self.length

    def sample(
        self, prompt_ids: list[list[int]], uniforms: Tensor, settings: SamplingSettings, captures: Captures
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of responses, `[N, T]`; see `engines.generate_responses`."""
        prompts, length, device = len(prompt_ids), settings.response_length, self.token.device
        self.uniforms[:prompts, :length] = uniforms
        self.tokens.fill_(settings.pad_token_id)
        self.logprobs.zero_()
        self.step_index.zero_()
        torch.arange(len(self.result_rows), out=self.result_rows)
        self.has_ended.copy_(self.result_rows >= prompts)  # rows of the buffers without a prompt count as ended
        self.live = min(captured_rows(prompts), self.decoder.rows)
        if settings.stop_token_ids not in self._stops:
            stops = torch.tensor(settings.stop_token_ids, dtype=torch.long, device=device)
            self._stops[settings.stop_token_ids] = stops
        self._draw(self.decoder.start(prompt_ids, self.live), settings, may_stop=sampling.may_stop(0, settings))
        settings_key = _settings_key(settings)
        for step in range(1, length):
            if sampling.is_check_due(step - 1, device) and not self._drop_ended():
                break
            width = min(captured_columns(self.decoder.width), self.decoder.columns)
            size = self.live, width, sampling.may_stop(step, settings)
            captures.run((DECODING, *size, settings_key), lambda: self.step(*size, settings))  # noqa: B023  # called at once
            self.decoder.count_step()
        return self.tokens[:prompts, :length], self.logprobs[:prompts, :length]

    def step(self, rows: int, width: int, may_stop: bool, settings: SamplingSettings) -> None:
        """Decode one token of each of the first `rows` sequences; a CUDA graph captures this function.

        The decoding step reads the model's weights at their own addresses, not autocast's copies of the weights.
        """
        with _autocast_without_cache(self._autocast, self.token.device):
            self._draw(self.decoder.advance(self.token[:rows], width), settings, may_stop=may_stop)

    def _draw(self, logits: Tensor, settings: SamplingSettings, *, may_stop: bool) -> None:
        rows = len(logits)
        result_rows, token, has_ended = self.result_rows[:rows], self.token[:rows], self.has_ended[:rows]
        drawn, logprob = sampling.sample_step(logits, self.uniforms[result_rows, self.step_index], settings, may_stop)
        self.tokens[result_rows, self.step_index] = drawn.masked_fill(has_ended, settings.pad_token_id)
        self.logprobs[result_rows, self.step_index] = logprob
        has_ended |= (drawn[:, None] == self._stops[settings.stop_token_ids]).any(dim=1)
        token.copy_(drawn)
        self.step_index += 1

    def _drop_ended(self) -> bool:
        """Drop ended sequences if the live sequences fit into a smaller batch; return whether a live sequence is left.

        Reading which sequences have ended forces a device sync.
        """
        ended = self.has_ended[: self.live].tolist()
        left = len(ended) - sum(ended)
        size = captured_rows(max(1, left))
        if size < self.live:
            staying = set([row for row, has_ended in enumerate(ended) if has_ended][: size - left])
            order = self.decoder.drop([has_ended and row not in staying for row, has_ended in enumerate(ended)])
            rows = torch.tensor(order, device=self.token.device)
            for buffer in (self.token, self.result_rows, self.has_ended):
                buffer[:size] = buffer[rows]
            self.live = size
        return left > 0


def held_bytes(captures: Captures) -> int:
    """Return the bytes of the decoding buffers that `captures` holds; the next batch reuses or frees the buffers."""
    return captures.held[DECODING].bytes if DECODING in captures.held else 0


def most_rows(model: PreTrainedModel, columns: int) -> int:
    """Return the most sequences of `columns` tokens for which decoding buffers are allocated."""
    return rows_kept(model.config.get_text_config(), columns, number_bytes(model), card_bytes(model.device))


def decode_captured(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    uniforms: Tensor,
    settings: SamplingSettings,
    captures: Captures,
) -> tuple[Tensor, Tensor]:
    """Sample the same tokens as `sampling.decode_packed`, up to rounding, with CUDA graphs.

    If the decoding buffers do not fit into memory, the function samples without CUDA graphs.
    """
    tokens, length = max(len(ids) for ids in prompt_ids), settings.response_length
    needed = buffer_rows(len(prompt_ids)), captured_columns(tokens + length), length
    if captures.serves(DECODING):
        try:
            return _sampler(model, needed, captures).sample(prompt_ids, uniforms[:, :length], settings, captures)
        except torch.OutOfMemoryError as error:
            why = in_one_line(error)
        captures.give_up(DECODING, why)
    return sampling.decode_packed(model, prompt_ids, uniforms, settings)


def _sampler(model: PreTrainedModel, needed: tuple[int, int, int], captures: Captures) -> CapturedSampler:
    """Return the sampler that `captures` holds, if the sampler's capacity suffices, else a new sampler.

    A new sampler has the larger of the held and the needed sizes, so that the sampler serves old and new batches. If
    the larger sizes exceed `most_rows`, the new sampler has the needed sizes.
    """
    held = captures.held.get(DECODING)
    if isinstance(held, CapturedSampler) and held.is_of(model):
        rows, columns, length = map(max, held.sizes, needed)
        if (rows, columns, length) == held.sizes:
            return held
        if rows <= most_rows(model, columns):
            # Keep the larger sizes, because an evaluation may need more tokens and fewer rows than the rollouts
            needed = rows, columns, length
    captures.release(DECODING)
    del held  # free the old sampler's buffers first, because the GPU's memory may not hold the buffers of two samplers
    sampler = CapturedSampler(model, *needed)
    captures.held[DECODING] = sampler
    return sampler


@probed_once
def why_not_captured(model: PreTrainedModel) -> str:
    """Return and log why CUDA graphs cannot capture a model's decoding steps; "" if CUDA graphs can.

    At the first call for a model, the hidden states of replayed decoding steps are compared with the hidden states of
    decoding steps without CUDA graphs, under the caller's autocast. A CUDA graph cannot capture an architecture that
    forces a device sync in each pass, such as a mixture of experts that loops over its experts.
    """
    device, captures = model.device, Captures(model.device, warns=False)
    if not captures.on:
        return f"it is on a device of type {device.type}"
    prompts, tokens = [[1, 2, 3], [4]], probe_ids(model, 2 * _PROBED_STEPS).view(_PROBED_STEPS, 2).to(device)
    plain = Captures(device, wanted=False)
    try:
        with torch.no_grad():
            expected, actual = (_states(model, prompts, tokens, each) for each in (plain, captures))
        why = captures.trouble.get(_PROBE, "")
        if not why and not are_close(actual, expected):
            why = "replayed steps give other states"
    except PROBE_ERRORS as error:
        why = in_one_line(error)
    captures.release()
    if why:
        log.info("%s is decoded without CUDA graphs: %s", type(model).__name__, why)
    return why


_PROBE = "probe"
_PROBED_STEPS = 4  # one step without a CUDA graph, one step that is captured, and two steps that replay the graph


def _states(model: PreTrainedModel, prompts: list[list[int]], tokens: Tensor, captures: Captures) -> Tensor:
    """Return the hidden states `[steps, 2, H]` of decoding the tokens `[steps, 2]` after two prompts."""
    decoder, token = InPlaceDecoder(model, 2, len(tokens) + 4, head=nn.Identity()), torch.zeros_like(tokens[0])
    states, autocast = torch.zeros_like(decoder.start(prompts, 2)), _autocast_now(model.device)

    def step() -> None:
        with _autocast_without_cache(autocast, model.device):
            states.copy_(decoder.advance(token, decoder.columns))

    all_states = []
    for step_tokens in tokens:
        token.copy_(step_tokens)
        captures.run((_PROBE,), step)
        decoder.count_step()
        all_states.append(states.clone())
    return torch.stack(all_states)


def _autocast_now(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _autocast_without_cache(dtype: torch.dtype | None, device: torch.device) -> torch.autocast:
    """Return the current autocast without its cache: a graph would read cached casts after autocast has freed them."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def _settings_key(settings: SamplingSettings) -> tuple[object, ...]:
    """Return the sampling settings on which the operations of a step depend."""
    filters = settings.temperature, settings.top_k, settings.top_p, settings.unused_ids
    return *filters, settings.stop_token_ids, settings.pad_token_id
