"""Decodes with a KV cache without padding: all sequences start in column 0, whatever their prompts' lengths.

In transformers' KV caches all rows have the same length. With transformers' KV caches, shorter prompts would need
padding, which attention would read in every decoding step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.passes.capabilities import PROBE_ERRORS, are_close, hidden_states_alone, probe_ids, probed_once, probing
from ppo_rlhf.passes.forward import backbone_of, logits_of, packs
from ppo_rlhf.passes.packed_attention import Attention, as_autocast, packed_hidden_states, take_rows
from ppo_rlhf.passes.prefixes import shared_prefix
from ppo_rlhf.passes.token_rows import right_padded

log = logging.getLogger(__name__)


class Decoder:
    """Decodes B sequences of a causal language model, one token per step, as the `Attention` of its forward passes."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Sequence[Sequence[int]],
        longest: int,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Set the model, which must pack (`forward.packs`), the prompts, and the maximum length of a sequence.

        `longest` counts the tokens of prompt and response. `head` computes logits from hidden states; None: the model's
        own head (`forward.logits_of`).
        """
        self._backbone, self._head = backbone_of(model), head or logits_of(model)
        # Keys of each call of attention in one forward pass: one tensor [rows, K, longest, d] for each call
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._longest = longest
        self._prompt_ids = prompt_ids
        # Lengths of the sequences as Python ints: reading `self.lengths` would need a device sync
        self._columns = [len(ids) for ids in prompt_ids]
        # [B] long, number of tokens of each sequence in the KV cache
        self.lengths = torch.tensor(self._columns, device=model.device)
        # Attention of the packed prompts, set only during the forward pass over the prompts
        self._prompts: Attention | None = None

    def prefill(self) -> Tensor:
        """Return the logits `[B, V]` that follow the prompts, whose common beginning is computed once."""
        prefix = shared_prefix(self._prompt_ids)
        rows = right_padded(self._prompt_ids, 0, prefix=prefix).to(self.lengths.device)
        # Index of each prompt's tokens in the packed row [B, L]
        self._prompts, self._places = rows.layout, rows.places()
        states = packed_hidden_states(self._backbone, rows.packed_ids, rows.packed_positions, self)
        self._prompts = None
        return self._head(take_rows(states, self._places.gather(1, self.lengths[:, None] - 1)[:, 0]))

    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token to each sequence, `token_ids` `[B]`, and return the logits `[B, V]` of the next tokens."""
        device, self._columns = self.lengths.device, [length + 1 for length in self._columns]
        # Counter of the calls of attention in this forward pass; a layer may call attention twice
        self._calls = count()
        self._rows, self._width = torch.arange(len(self.lengths), device=device), max(self._columns)
        # Mask of floats to add to the attention scores, because torch would convert a Boolean mask at each call
        self._mask = None
        if min(self._columns) != self._width:
            # Round the mask's width up to a multiple of 8, so that the rows of the mask are aligned in memory
            columns = torch.arange(-(-self._width // 8) * 8, device=device)
            mask = torch.zeros(len(self.lengths), 1, 1, len(columns), dtype=self._keys[0].dtype, device=device)
            mask.masked_fill_((columns > self.lengths[:, None])[:, None, None], -torch.inf)
            self._mask = mask[..., : self._width]
        states = packed_hidden_states(self._backbone, token_ids[None], self.lengths[None], self)
        self.lengths = self.lengths + 1
        return self._head(states)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Append keys and values to the KV cache and attend.

        In the forward pass over the prompts, tokens attend within their prompts. In a decoding step, each new token
        attends to its sequence, and query heads that share a key head are computed together, as rows of one query.
        """
        if self._prompts is not None:
            self._keys.append(self._cache(as_autocast(key_NKD)[self._places]))
            self._values.append(self._cache(as_autocast(value_NKD)[self._places]))
            return self._prompts.attend(query_NHD, key_NKD, value_NKD, scaling)
        call, rows, heads = next(self._calls), len(query_NHD), query_NHD.shape[1]
        keys, values = self._keys[call][:rows], self._values[call][:rows]
        keys[self._rows, :, self.lengths] = as_autocast(key_NKD).to(keys.dtype)
        values[self._rows, :, self.lengths] = as_autocast(value_NKD).to(values.dtype)
        query = query_NHD.reshape(rows, keys.shape[1], heads // keys.shape[1], -1).to(keys.dtype)
        attended = nn.functional.scaled_dot_product_attention(
            query, keys[:, :, : self._width], values[:, :, : self._width], attn_mask=self._mask, scale=scaling
        )
        return attended.reshape(rows, heads, -1).to(as_autocast(query_NHD).dtype)

    def _cache(self, spread_BLKD: Tensor) -> Tensor:
        """Return a KV cache tensor `[B, K, longest, d]` whose first L columns hold `spread_BLKD`."""
        rows, length, heads, width = spread_BLKD.shape
        cache = spread_BLKD.new_zeros(rows, heads, self._longest, width)
        cache[:, :, :length] = spread_BLKD.transpose(1, 2)
        return cache

    def drop(self, ended: Sequence[bool]) -> list[int]:
        """Remove the sequences that have ended, and return the old row index of each remaining sequence.

        The last rows of the KV cache move into the freed rows, so that few rows are copied.
        """
        live = [row for row, has_ended in enumerate(ended) if not has_ended]
        from_the_end = iter(reversed(live))
        order = [row if not ended[row] else next(from_the_end) for row in range(len(live))]
        moved = [row for row, old_row in enumerate(order) if row != old_row]
        if moved:
            rows = torch.tensor(moved, device=self.lengths.device)
            old_rows = torch.tensor([order[row] for row in moved], device=self.lengths.device)
            width = max(self._columns)
            for cache in (*self._keys, *self._values):
                cache[rows, :, :width] = cache[old_rows, :, :width]
            self.lengths[rows] = self.lengths[old_rows]
        self.lengths = self.lengths[: len(live)]
        self._columns = [self._columns[row] for row in order]
        return order


@probed_once
def decodes(model: PreTrainedModel) -> bool:
    """Return whether decoding steps give the same hidden states as passes over whole sequences.

    A model is probed at its first call.
    """
    if packs(backbone_of(model)) and _decodes_like_whole_passes(model):
        return True
    log.info("%s is decoded by transformers' generate, which takes longer.", type(model).__name__)
    return False


def _decodes_like_whole_passes(model: PreTrainedModel) -> bool:
    """Compare two decoding steps after prompts of two lengths with whole passes over single sequences."""
    backbone, sequences, steps = backbone_of(model), [probe_ids(model, 7), probe_ids(model, 5).flip(0)], 2
    decoder = Decoder(model, [ids[:-steps].tolist() for ids in sequences], 7, head=nn.Identity())
    try:
        with probing(model):
            decoded = [decoder.prefill()]
            for step in range(-steps, 0):
                decoded.append(decoder.step(torch.stack([ids[step] for ids in sequences]).to(model.device)))
            alone = [hidden_states_alone(backbone, ids) for ids in sequences]
    except PROBE_ERRORS:
        return False
    expected = torch.stack([states[-steps - 1 :] for states in alone], dim=1)
    return are_close(torch.stack(decoded), expected)
