"""Decoding in buffers at fixed addresses, so that a CUDA graph can hold a step (`models.captures`).

All steps of a size do the same operations on the same addresses. No Python number changes between two steps, and the
host reads nothing from the device.
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
"""The smallest number of sequences and of columns of a captured step."""
CACHES_SHARE = 2
"""Keys and values may take 1/2 of the memory that graphs may keep (`captures.CARDS_SHARE`)."""


def next_size(needed: int, least: int) -> int:
    """Return the smallest allowed size >= `needed`.

    The allowed sizes are `least`, and 2^n and 3 · 2^(n − 1) above `least`.
    """
    size = least
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 and size * 3 // 2 >= needed else 1 << size.bit_length()
    return size


def rows_kept(text: PretrainedConfig, columns: int, number: int, card: int) -> int:
    """Return the most sequences whose keys and values graphs may keep, a multiple of `FEWEST_ROWS`.

    Each sequence has `columns` tokens. `number` is the bytes of a number, and `card` the bytes of the GPU's memory.
    """
    fitting = card // (CARDS_SHARE * CACHES_SHARE) // cache_bytes(text, columns, number)
    return max(1, fitting // FEWEST_ROWS) * FEWEST_ROWS


class InPlaceDecoder(Decoder):
    """A decoder with buffers for a fixed number of sequences and columns, reused for many batches of prompts."""

    def __init__(
        self, model: PreTrainedModel, rows: int, columns: int, head: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Set the model, which must pack, the maximum number of sequences, and the maximum length of a sequence."""
        super().__init__(model, [()] * rows, columns, head)
        self.rows, self.columns = rows, columns
        self._all_lengths = self.lengths
        self._all_rows = torch.arange(rows, device=model.device)
        self._all_columns = torch.arange(columns, device=model.device)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(cache.nbytes for cache in (*self._keys, *self._values))

    @property
    def width(self) -> int:
        """Columns that the next step needs, read without a device sync."""
        return max(self._columns) + 1

    def start(self, prompt_ids: Sequence[Sequence[int]], rows: int) -> Tensor:
        """Replace all sequences by new prompts; return the logits `[prompts, V]` that follow the prompts.

        Later steps compute `rows` sequences. The sequences after the prompts are empty, and their logits mean nothing.
        """
        self._prompt_ids = prompt_ids
        self._columns = [*(len(ids) for ids in prompt_ids), *[0] * (rows - len(prompt_ids))]
        self.lengths = self._all_lengths[: len(prompt_ids)]
        self._all_lengths[:rows].copy_(torch.tensor(self._columns))
        for cache in (*self._keys, *self._values):
            cache.zero_()  # zero the KV cache: masked columns have an attention weight of 0, and 0 · NaN would be NaN
        self._calls = count()  # counter of the calls of attention in the forward pass over the prompts
        logits = self.prefill()
        self.lengths = self._all_lengths[:rows]
        return logits

    def advance(self, token_ids: Tensor, width: int) -> Tensor:
        """Append one token `[B]` to each of the first B sequences, and return the logits `[B, V]` that follow.

        Attention reads the first `width` columns. Call `count_step` after each step, also after a replayed step.
        """
        rows = len(token_ids)
        lengths = self._all_lengths[:rows]
        self._calls, self._rows, self._width, self.lengths = count(), self._all_rows[:rows], width, lengths
        hidden = self._all_columns[:width] > lengths[:, None]
        self._mask = torch.zeros(rows, 1, 1, width, dtype=self._keys[0].dtype, device=lengths.device)
        self._mask.masked_fill_(hidden[:, None, None], -torch.inf)
        states = packed_hidden_states(self._backbone, token_ids[None], lengths[None], self)
        lengths += 1
        return self._head(states)

    def count_step(self) -> None:
        """Add the last step's token to the host's count of each sequence's tokens."""
        self._columns = [length + 1 for length in self._columns]

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """As `Decoder.attend`, but with fixed buffers for the prompts' keys and values, which the first call makes."""
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
