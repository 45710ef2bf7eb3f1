"""Decoding in buffers that stay in their places: each step of a size is the same operations on the same addresses.

Nothing that changes between two steps is a Python number, and the processor reads nothing from the device, so a CUDA
graph can hold a step (`models.captures`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_rlhf.models.captures import CARDS_SHARE
from ppo_rlhf.models.decoding import Decoder
from ppo_rlhf.models.free_memory import cache_bytes
from ppo_rlhf.models.packed_attention import as_autocast, packed_hidden_states

FEWEST_ROWS, FEWEST_COLUMNS = 16, 64
CACHES_SHARE = 2
"""Keys and values may take this part of what graphs may keep: a half, beside micro-batches."""


def next_size(needed: int, least: int) -> int:
    """Return the smallest size that is not below what is needed: two sizes from one power of 2 to the next."""
    size = least
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 and size * 3 // 2 >= needed else 1 << size.bit_length()
    return size


def rows_kept(text: PretrainedConfig, columns: int, number: int, card: int) -> int:
    """Return the most sequences whose keys and values graphs may keep, a multiple of `FEWEST_ROWS`.

    Each has so many columns; `number` is the bytes of a number, and `card` those of the GPU's memory.
    """
    fitting = card // (CARDS_SHARE * CACHES_SHARE) // cache_bytes(text, columns, number)
    return max(1, fitting // FEWEST_ROWS) * FEWEST_ROWS


class InPlaceDecoder(Decoder):
    """A decoder with room for a number of sequences and of columns, which serves many batches of prompts."""

    def __init__(
        self, model: PreTrainedModel, rows: int, columns: int, head: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Take a model that packs, the most sequences, and the most tokens that one of them can get."""
        super().__init__(model, [()] * rows, columns, head)
        self.rows, self.columns = rows, columns
        self._lengths_of_all = self.lengths
        self._all_rows = torch.arange(rows, device=model.device)
        self._all_places = torch.arange(columns, device=model.device)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(cache.nbytes for cache in (*self._keys, *self._values))

    @property
    def width(self) -> int:
        """Columns that the next step needs, known without waiting for the device."""
        return max(self._columns) + 1

    def start(self, prompt_ids: Sequence[Sequence[int]], rows: int) -> Tensor:
        """Forget all sequences and take prompts; return the logits that follow them, `[prompts, V]`.

        Steps take `rows` sequences from now on; those behind the prompts are empty, and their logits mean nothing.
        """
        self._prompt_ids = prompt_ids
        self._columns = [*(len(ids) for ids in prompt_ids), *[0] * (rows - len(prompt_ids))]
        self.lengths = self._lengths_of_all[: len(prompt_ids)]
        self._lengths_of_all[:rows].copy_(torch.tensor(self._columns))
        for cache in (*self._keys, *self._values):
            cache.zero_()  # a weight of 0 times what stands behind a sequence must be 0
        self._calls = count()  # of attention in the pass over the prompts
        logits = self.prefill()
        self.lengths = self._lengths_of_all[:rows]
        return logits

    def advance(self, token_ids: Tensor, width: int) -> Tensor:
        """Take one token of each of the first B sequences, `[B]`, and return the logits `[B, V]` that follow it.

        Attention reads the first `width` columns. `count_step` tells the decoder of the step, also of one replayed.
        """
        rows = len(token_ids)
        lengths = self._lengths_of_all[:rows]
        self._calls, self._rows, self._width, self.lengths = count(), self._all_rows[:rows], width, lengths
        hidden = self._all_places[:width] > lengths[:, None]
        self._mask = torch.zeros(rows, 1, 1, width, dtype=self._keys[0].dtype, device=lengths.device)
        self._mask.masked_fill_(hidden[:, None, None], -torch.inf)
        states = packed_hidden_states(self._backbone, token_ids[None], lengths[None], self)
        lengths += 1
        return self._head(states)

    def count_step(self) -> None:
        """Count the tokens of the last step on the host."""
        self._columns = [length + 1 for length in self._columns]

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """See `Decoder.attend`; the prompts' keys and values go into the buffers, which the first prompts make."""
        if self._prompts is None:
            return super().attend(query_NHD, key_NKD, value_NKD, scaling)
        call = next(self._calls)
        for caches, tokens in ((self._keys, key_NKD), (self._values, value_NKD)):
            spread = self._prompts.spread(as_autocast(tokens)).transpose(1, 2)  # [prompts, K, L, d]
            prompts, heads, length, size = spread.shape
            if call == len(caches):
                caches.append(spread.new_zeros(self.rows, heads, self.columns, size))
            caches[call][:prompts, :, :length] = spread
        return self._prompts.attend(query_NHD, key_NKD, value_NKD, scaling)
