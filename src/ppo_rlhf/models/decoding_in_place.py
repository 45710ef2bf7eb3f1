"""Decodes in buffers at fixed addresses, so that a CUDA graph can capture a decoding step (`models.captures`).

All decoding steps of one size do the same operations on the same addresses. A captured decoding step depends on no
Python number that changes between steps, and reads no values from the device to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_rlhf.models.captures import most_bytes
from ppo_rlhf.models.common_sizes import FEWEST_ROWS
from ppo_rlhf.models.decoding import Decoder
from ppo_rlhf.models.free_memory import cache_bytes
from ppo_rlhf.models.packed_attention import as_autocast, packed_hidden_states

CACHES_SHARE = 2
"""The KV cache may take 1/2 of the memory that CUDA graphs may keep (`captures.most_bytes`)."""


def rows_kept(text: PretrainedConfig, columns: int, number: int, card: int) -> int:
    """Return the most sequences whose KV cache CUDA graphs may keep, a multiple of `FEWEST_ROWS`.

    Each sequence has `columns` tokens. `number` is the bytes of one number in the KV cache, and `card` the bytes of the
    GPU's memory.
    """
    fitting = most_bytes(card) // CACHES_SHARE // cache_bytes(text, columns, number)
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
        """Bytes of the KV cache."""
        return sum(cache.nbytes for cache in (*self._keys, *self._values))

    @property
    def width(self) -> int:
        """Number of KV cache columns that the next decoding step needs, read without a device sync."""
        return max(self._columns) + 1

    def start(self, prompt_ids: Sequence[Sequence[int]], rows: int) -> Tensor:
        """Replace all sequences by new prompts; return the logits `[prompts, V]` that follow the prompts.

        Later decoding steps compute `rows` sequences. Sequences without a prompt are empty, and the logits of empty
        sequences have no meaning.
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
        """Append `token_ids` `[B]` to the first B sequences, and return the logits `[B, V]` of the next tokens.

        Attention reads the first `width` columns of the KV cache. The caller must call `count_step` after each decoding
        step, also after a replayed step.
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
        """Add 1 to the host's count of each sequence's tokens, after a decoding step."""
        self._columns = [length + 1 for length in self._columns]

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Attend as `Decoder.attend`, but keep the keys and values in fixed buffers, which the first call allocates."""
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
