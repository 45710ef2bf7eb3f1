"""Decoding with a cache of keys and values without padding: prompts of different lengths start in column 0.

transformers' caches give all rows one length, so prompts of different lengths need padding that every step attends to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.models.capabilities import PROBE_ERRORS, are_close, hidden_states_alone, probe_ids, probed_once, probing
from ppo_rlhf.models.forward import backbone_of, logits_of, packs
from ppo_rlhf.models.packed_attention import PackedLayout, as_autocast, packed_hidden_states, take_rows
from ppo_rlhf.models.token_rows import right_padded

log = logging.getLogger(__name__)


class Decoder:
    """Continues B sequences of a causal language model by one token each in a step.

    Attributes:
        lengths: Tokens of each live sequence in the cache, `[B]` long, on the model's device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Sequence[Sequence[int]],
        longest: int,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take a model that packs (`forward.packs`), the prompts, and the most tokens that a sequence can get.

        `head` gives the logits of hidden states; None takes the model's own (`forward.logits_of`).
        """
        self._backbone, self._head = backbone_of(model), head or logits_of(model)
        self._keys: list[Tensor] = []  # one entry for each call of attention in a pass, [rows, K, longest, d]
        self._values: list[Tensor] = []
        self._longest = longest
        self._prompt_ids = prompt_ids
        self._columns = [len(ids) for ids in prompt_ids]
        self.lengths = torch.tensor(self._columns, device=model.device)

    def prefill(self) -> Tensor:
        """Return the logits `[B, V]` that follow the prompts."""
        device = self.lengths.device
        rows = right_padded(self._prompt_ids, 0).to(device)
        prefill = Prefill(rows.layout, self._keys, self._values, self._longest)
        states = packed_hidden_states(self._backbone, rows.packed_ids, rows.packed_positions, prefill)
        return self._head(take_rows(states, self.lengths.cumsum(0) - 1))

    def step(self, token_ids: Tensor) -> Tensor:
        """Take one token of each sequence, `[B]`, and return the logits `[B, V]` that follow it."""
        attention = CachedAttention(self._keys, self._values, self.lengths, self._columns)
        states = packed_hidden_states(self._backbone, token_ids[None], self.lengths[None], attention)
        self.lengths = self.lengths + 1
        self._columns = [length + 1 for length in self._columns]
        return self._head(states)

    def drop(self, ended: Sequence[bool]) -> list[int]:
        """Remove the sequences that have ended; return the former rows of the others in their new order.

        Rows at the end move up into the freed rows, so that little is copied.
        """
        live = [row for row, has_ended in enumerate(ended) if not has_ended]
        from_the_end = iter(reversed(live))
        order = [row if not ended[row] else next(from_the_end) for row in range(len(live))]
        moved = [row for row, former in enumerate(order) if row != former]
        if moved:
            rows = torch.tensor(moved, device=self.lengths.device)
            formers = torch.tensor([order[row] for row in moved], device=self.lengths.device)
            width = max(self._columns)
            for cache in (*self._keys, *self._values):
                cache[rows, :, :width] = cache[formers, :, :width]
            self.lengths[rows] = self.lengths[formers]
        self.lengths = self.lengths[: len(live)]
        self._columns = [self._columns[row] for row in order]
        return order


@probed_once
def decodes(model: PreTrainedModel) -> bool:
    """Return whether decoding step by step gives the hidden states of whole passes; probed at the first call."""
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
            found = [decoder.prefill()]
            for step in range(-steps, 0):
                found.append(decoder.step(torch.stack([ids[step] for ids in sequences]).to(model.device)))
            alone = [hidden_states_alone(backbone, ids) for ids in sequences]
    except PROBE_ERRORS:
        return False
    expected = torch.stack([states[-steps - 1 :] for states in alone], dim=1)
    return are_close(torch.stack(found), expected)


@dataclass(frozen=True)
class Prefill:
    """Attention within prompts that fills the cache; see `packed_attention.Attention`."""

    layout: PackedLayout  # of B prompts
    keys: list[Tensor]  # gets [B, K, capacity, d] at each call of attention in the pass
    values: list[Tensor]  # likewise
    capacity: int  # columns of the cache

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Attend within each prompt."""
        self.keys.append(self._cache(self.layout.spread(as_autocast(key_NKD))))
        self.values.append(self._cache(self.layout.spread(as_autocast(value_NKD))))
        return self.layout.attend(query_NHD, key_NKD, value_NKD, scaling)

    def _cache(self, spread_BLKD: Tensor) -> Tensor:
        """Return `[B, K, capacity, d]` that begins with these columns."""
        rows, length, heads, width = spread_BLKD.shape
        cache = spread_BLKD.new_zeros(rows, heads, self.capacity, width)
        cache[:, :, :length] = spread_BLKD.transpose(1, 2)
        return cache


class CachedAttention:
    """Attention of a new token of each of B sequences to its cache, for one pass; see `packed_attention.Attention`."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], lengths: Tensor, columns: Sequence[int]) -> None:
        """Take the cache and how much of it is filled.

        Args:
            keys: `[rows, K, capacity, d]` for each call of attention in a pass; the first B rows are the sequences'.
            values: Likewise.
            lengths: Columns of each sequence so far, `[B]` long: the new keys and values come after them.
            columns: The same numbers, known without waiting for the device.
        """
        self.keys, self.values, self.lengths, self.width = keys, values, lengths, max(columns) + 1
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.mask = None  # added to the scores, as kernels take it: of a Boolean one each call would make its own
        if min(columns) != max(columns):
            places = torch.arange(-(-self.width // 8) * 8, device=lengths.device)  # in rows of whole vectors
            mask = torch.zeros(len(lengths), 1, 1, len(places), dtype=keys[0].dtype, device=lengths.device)
            mask.masked_fill_((places > lengths[:, None])[:, None, None], -torch.inf)
            self.mask = mask[..., : self.width]
        self.calls = count()  # of attention in this pass, not layers: some attend twice

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Store the new keys and values, and attend to all columns so far; heads that share a key go as one."""
        call, rows, heads = next(self.calls), len(query_NHD), query_NHD.shape[1]
        keys, values = self.keys[call][:rows], self.values[call][:rows]
        keys[self.rows, :, self.lengths] = as_autocast(key_NKD).to(keys.dtype)
        values[self.rows, :, self.lengths] = as_autocast(value_NKD).to(values.dtype)
        query = query_NHD.reshape(rows, keys.shape[1], heads // keys.shape[1], -1).to(keys.dtype)
        attended = nn.functional.scaled_dot_product_attention(
            query, keys[:, :, : self.width], values[:, :, : self.width], attn_mask=self.mask, scale=scaling
        )
        return attended.reshape(rows, heads, -1).to(as_autocast(query_NHD).dtype)
