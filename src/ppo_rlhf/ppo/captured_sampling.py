"""Sampling whose steps are CUDA graphs: the tokens of `engines`, drawn in buffers that stay in their places."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.core.logprobs import card_bytes
from ppo_rlhf.models.capabilities import PROBE_ERRORS, are_close, probe_ids, probed_once
from ppo_rlhf.models.captures import DECODING, Captures, addresses
from ppo_rlhf.models.decoding_in_place import (
    FEWEST_COLUMNS,
    FEWEST_ROWS,
    InPlaceDecoder,
    next_size,
    rows_kept,
)
from ppo_rlhf.models.free_memory import number_bytes
from ppo_rlhf.ppo import engines
from ppo_rlhf.ppo.engines import SamplingSettings

log = logging.getLogger(__name__)


class CapturedSampler:
    """Draws responses to up to so many prompts; it serves many batches, and other settings than the first ones."""

    def __init__(self, model: PreTrainedModel, rows: int, columns: int, length: int) -> None:
        """Make room for `rows` sequences of `columns` tokens, at most `length` of them in a response."""
        device = model.device
        wide = compute_dtype(model)
        self.decoder, self.length = InPlaceDecoder(model, rows, columns), length
        self.uniforms = torch.zeros(rows, length, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, length, dtype=wide, device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)  # the last of each sequence
        self.places = torch.arange(rows, device=device)  # the row of each sequence in the results
        self.has_ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.number = torch.zeros(1, dtype=torch.long, device=device)  # of the step
        self.live = rows  # sequences that are still decoded, from the first row on
        self._model, self._weights_at, self._autocast = model, addresses(model), _autocast_now(device)
        self._stops: dict[tuple[int, ...], Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the buffers."""
        own = (self.uniforms, self.tokens, self.logprobs, self.token, self.places, self.has_ended)
        return self.decoder.bytes + sum(buffer.nbytes for buffer in own)

    def is_of(self, model: PreTrainedModel) -> bool:
        """Return whether the graphs read a model's weights where they lie now, under autocast as it is now."""
        is_same = self._model is model and self._autocast == _autocast_now(model.device)
        return is_same and self._weights_at == addresses(model)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The room: sequences, their tokens, and those of a response."""
        return self.decoder.rows, self.decoder.columns, self.length

    def sample(
        self, prompt_ids: list[list[int]], uniforms: Tensor, settings: SamplingSettings, captures: Captures
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of responses, `[N, T]`; see `engines.generate_responses`."""
        given, length, device = len(prompt_ids), settings.response_length, self.token.device
        self.uniforms[:given, :length] = uniforms
        self.tokens.fill_(settings.pad_token_id)
        self.logprobs.zero_()
        self.number.zero_()
        torch.arange(len(self.places), out=self.places)
        self.has_ended.copy_(self.places >= given)  # rows behind the prompts have ended
        self.live = min(next_size(given, FEWEST_ROWS), self.decoder.rows)
        if settings.stop_token_ids not in self._stops:
            stops = torch.tensor(settings.stop_token_ids, dtype=torch.long, device=device)
            self._stops[settings.stop_token_ids] = stops
        self._draw(self.decoder.start(prompt_ids, self.live), settings, may_stop=engines.may_stop(0, settings))
        how = _how(settings)
        for number in range(1, length):
            if engines.is_time_to_look(number - 1, device) and not self._let_ended_leave():
                break
            width = min(next_size(self.decoder.width, FEWEST_COLUMNS), self.decoder.columns)
            size = self.live, width, engines.may_stop(number, settings)
            captures.run((DECODING, *size, how), lambda: self.step(*size, settings))  # noqa: B023  # called at once
            self.decoder.count_step()
        return self.tokens[:given, :length], self.logprobs[:given, :length]

    def step(self, rows: int, width: int, may_stop: bool, settings: SamplingSettings) -> None:
        """Take the last token of each of the first sequences, and draw the next: what a graph holds.

        Weights are read where they stand in the model's modules.
        """
        with _without_autocasts_cache(self._autocast, self.token.device):
            self._draw(self.decoder.advance(self.token[:rows], width), settings, may_stop=may_stop)

    def _draw(self, logits: Tensor, settings: SamplingSettings, *, may_stop: bool) -> None:
        rows = len(logits)
        places, token, has_ended = self.places[:rows], self.token[:rows], self.has_ended[:rows]
        drawn, logprob = engines.sample_step(logits, self.uniforms[places, self.number], settings, may_stop)
        self.tokens[places, self.number] = drawn.masked_fill(has_ended, settings.pad_token_id)
        self.logprobs[places, self.number] = logprob
        has_ended |= (drawn[:, None] == self._stops[settings.stop_token_ids]).any(dim=1)
        token.copy_(drawn)
        self.number += 1

    def _let_ended_leave(self) -> bool:
        """Go on with fewer rows if a smaller size does; return whether any sequence is left. Waits for the device."""
        ended = self.has_ended[: self.live].tolist()
        left = len(ended) - sum(ended)
        size = next_size(max(1, left), FEWEST_ROWS)
        if size < self.live:
            staying = set([row for row, has_ended in enumerate(ended) if has_ended][: size - left])
            order = self.decoder.drop([has_ended and row not in staying for row, has_ended in enumerate(ended)])
            rows = torch.tensor(order, device=self.token.device)
            for buffer in (self.token, self.places, self.has_ended):
                buffer[:size] = buffer[rows]
            self.live = size
        return left > 0


def held_bytes(captures: Captures) -> int:
    """Return the bytes of the buffers that the next batch uses again, or that are freed for it."""
    return captures.held[DECODING].bytes if DECODING in captures.held else 0


def columns_of(tokens: int) -> int:
    """Return the columns of the buffers for sequences of so many tokens."""
    return next_size(tokens, FEWEST_COLUMNS)


def most_rows(model: PreTrainedModel, columns: int) -> int:
    """Return the most sequences of so many columns for which there are buffers."""
    return rows_kept(model.config.get_text_config(), columns, number_bytes(model), card_bytes(model.device))


def decode_captured(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    uniforms: Tensor,
    settings: SamplingSettings,
    captures: Captures,
) -> tuple[Tensor, Tensor]:
    """Sample as `engines.decode_packed`, which it leaves the batch to if the memory does not do for its buffers.

    The tokens are the same, but for rounding.
    """
    rows, tokens = -(-len(prompt_ids) // FEWEST_ROWS) * FEWEST_ROWS, max(len(ids) for ids in prompt_ids)
    length = settings.response_length
    needed = rows, columns_of(tokens + length), length
    if captures.serves(DECODING):
        try:
            return _sampler(model, needed, captures).sample(prompt_ids, uniforms[:, :length], settings, captures)
        except torch.OutOfMemoryError as error:
            why = in_one_line(error)
        captures.give_up(DECODING, why)
    return engines.decode_packed(model, prompt_ids, uniforms, settings)


def _sampler(model: PreTrainedModel, needed: tuple[int, int, int], captures: Captures) -> CapturedSampler:
    """Return a sampler with the room that is needed: the one that is held, if it has it, or one with room for both.

    Together they may be too large; then the new one has only its own.
    """
    held = captures.held.get(DECODING)
    if isinstance(held, CapturedSampler) and held.is_of(model):
        rows, columns, length = map(max, held.sizes, needed)
        if (rows, columns, length) == held.sizes:
            return held
        if rows <= most_rows(model, columns):
            needed = rows, columns, length  # an evaluation between rollouts may need more tokens and fewer rows
    captures.release(DECODING)
    del held  # both would not fit
    sampler = CapturedSampler(model, *needed)
    captures.held[DECODING] = sampler
    return sampler


@probed_once
def why_not_captured(model: PreTrainedModel) -> str:
    """Return why steps cannot be captured, which is logged; "" if replays give what plain steps give.

    It is probed at the first call, under the caller's autocast. Some architectures make the processor wait in each
    pass, such as mixtures of experts that loop over their experts.
    """
    device, captures = model.device, Captures(model.device, warns=False)
    if not captures.on:
        return f"it is on a device of type {device.type}"
    prompts, tokens = [[1, 2, 3], [4]], probe_ids(model, 2 * _PROBED_STEPS).view(_PROBED_STEPS, 2).to(device)
    plain = Captures(device, wanted=False)
    try:
        with torch.no_grad():
            expected, found = (_states(model, prompts, tokens, each) for each in (plain, captures))
        why = captures.trouble.get(_PROBE) or ("" if are_close(found, expected) else "replayed steps give other states")
    except PROBE_ERRORS as error:
        why = in_one_line(error)
    captures.release()
    if why:
        log.info("%s is decoded without CUDA graphs: %s", type(model).__name__, why)
    return why


_PROBE = "probe"
_PROBED_STEPS = 4  # one plain, one captured, two replayed


def _states(model: PreTrainedModel, prompts: list[list[int]], tokens: Tensor, captures: Captures) -> Tensor:
    """Return the hidden states `[steps, 2, H]` of given tokens `[steps, 2]` after prompts."""
    decoder, token = InPlaceDecoder(model, 2, len(tokens) + 4, head=nn.Identity()), torch.zeros_like(tokens[0])
    states, autocast = torch.zeros_like(decoder.start(prompts, 2)), _autocast_now(model.device)

    def step() -> None:
        with _without_autocasts_cache(autocast, model.device):
            states.copy_(decoder.advance(token, decoder.columns))

    found = []
    for drawn in tokens:
        token.copy_(drawn)
        captures.run((_PROBE,), step)
        decoder.count_step()
        found.append(states.clone())
    return torch.stack(found)


def _autocast_now(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _without_autocasts_cache(dtype: torch.dtype | None, device: torch.device) -> torch.autocast:
    """Return autocast as it is, but without its cache: a graph would read casts that are gone with the context."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def _how(settings: SamplingSettings) -> tuple[object, ...]:
    """Return what a step's operations depend on."""
    return settings.temperature, settings.top_k, settings.top_p, settings.stop_token_ids, settings.pad_token_id
