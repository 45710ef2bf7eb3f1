"""Keys and values of sequences that are being decoded, each from column 0 on: no padding on the left, rows that end go.

Transformers' caches give all rows one length, so prompts of different lengths need padding that every step attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.packed_attention import PackedLayout, filling, packed_states
from ppo_rlhf.models.trunks import backbone_of, logits_of

BUCKET = 64
"""Tokens by which the memory for keys and values grows."""


class Decoder:
    """A causal language model that goes on with B sequences, a token each a step.

    Attributes:
        lengths: Tokens of each live sequence whose keys and values are held, `[B]` long, on the model's device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Sequence[Sequence[int]],
        longest: int,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take a model that packs (`trunks.packs`), the prompts, and how long a sequence can get.

        `head` gives the logits of states; None finds out which does.
        """
        self._model, self._backbone, self._head = model, backbone_of(model), head or logits_of(model)
        self._keys: dict[int, Tensor] = {}  # layer -> [slots, heads, capacity, d]
        self._values: dict[int, Tensor] = {}
        self._longest = longest
        self._prefilling: PackedLayout | None = None
        self._width = 0  # columns that a step attends to
        self._rows: Tensor | None = None  # of the live sequences, counted
        self._mask: Tensor | None = None
        self._prompt_ids = prompt_ids
        self._columns = [len(ids) for ids in prompt_ids]
        self.lengths = torch.tensor(self._columns, device=model.device)

    def prefill(self) -> Tensor:
        """Return the logits `[B, V]` that follow the prompts; equal prompts that stand together are computed once."""
        device = self._model.device
        distinct, of_row = _distinct(self._prompt_ids)
        lengths = [len(ids) for ids in distinct]
        more = filling(lengths)
        tokens = [token for ids in distinct for token in ids] + [distinct[-1][-1]] * more
        positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(more, dtype=torch.long)])
        self._prefilling = PackedLayout.of(lengths, device, more=more)
        ids = torch.tensor([tokens], device=device)
        states = packed_states(self._backbone, ids, positions[None].to(device), self)
        self._prefilling = None
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self._head(states[last])
        if len(distinct) == len(self._prompt_ids):
            return logits
        index = torch.tensor(of_row, device=device)
        for held in (self._keys, self._values):
            for layer in held:
                held[layer] = held[layer].index_select(0, index)
        return logits.index_select(0, index)

    def step(self, token_ids: Tensor) -> Tensor:
        """Take one token of each sequence, `[B]`, and return the logits `[B, V]` that follow it."""
        self._width = max(self._columns) + 1
        self._rows = torch.arange(len(self._columns), device=self.lengths.device)
        is_even = min(self._columns) == self._width - 1
        columns = torch.arange(self._width, device=self.lengths.device)
        self._mask = None if is_even else columns <= self.lengths[:, None]
        self._make_room()
        logits = self._head(packed_states(self._backbone, token_ids[None], self.lengths[None], self))
        self.lengths = self.lengths + 1
        self._columns = [length + 1 for length in self._columns]
        return logits

    def drop(self, ended: Sequence[bool]) -> list[int]:
        """Leave out the sequences that have ended; return the others' former rows in their new order.

        Those at the end move up into the freed rows, so that little is copied.
        """
        live = [row for row, has_ended in enumerate(ended) if not has_ended]
        from_the_end = iter(reversed(live))
        order = [row if not ended[row] else next(from_the_end) for row in range(len(live))]
        moved = [row for row, former in enumerate(order) if row != former]
        if moved:
            slots = torch.tensor(moved, device=self.lengths.device)
            formers = torch.tensor([order[row] for row in moved], device=self.lengths.device)
            width = max(self._columns)
            for held in (self._keys, self._values):
                for tensor in held.values():
                    tensor[slots, :, :width] = tensor[formers, :, :width]
            self.lengths[slots] = self.lengths[formers]
        self.lengths = self.lengths[: len(live)]
        self._columns = [self._columns[row] for row in order]
        return order

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None
    ) -> Tensor:
        """Remember keys and values and attend to all that came before; see `packed_attention.Attention`."""
        if self._prefilling is not None:
            self._keys[layer] = self._store(self._prefilling.spread(key_NKD))
            self._values[layer] = self._store(self._prefilling.spread(value_NKD))
            return self._prefilling.attend(layer, query_NHD, key_NKD, value_NKD, scaling)
        keys, values = self._keys[layer][: len(query_NHD)], self._values[layer][: len(query_NHD)]
        keys[self._rows, :, self.lengths] = key_NKD.to(keys.dtype)
        values[self._rows, :, self.lengths] = value_NKD.to(keys.dtype)
        held = keys[:, :, : self._width], values[:, :, : self._width]
        return _attend_to_held(query_NHD, *held, self._mask, scaling)

    def _store(self, spread_BLKD: Tensor) -> Tensor:
        """Return memory `[B, K, capacity, d]` that begins with these columns."""
        rows, _, heads, width = spread_BLKD.shape
        length = max(self._columns)
        dtype = _held_dtype(spread_BLKD)
        memory = spread_BLKD.new_zeros(rows, heads, self._capacity(length + 1), width, dtype=dtype)
        memory[:, :, :length] = spread_BLKD[:, :length].transpose(1, 2)
        return memory

    def _capacity(self, columns: int) -> int:
        return min(self._longest, -(-columns // BUCKET) * BUCKET)

    def _make_room(self) -> None:
        """Let every sequence grow by a token."""
        for held in (self._keys, self._values):
            for layer, tensor in held.items():
                if tensor.shape[2] < self._width:
                    more = self._capacity(self._width) - tensor.shape[2]
                    held[layer] = nn.functional.pad(tensor[: len(self._columns)], (0, 0, 0, more))


def _attend_to_held(
    query_BHD: Tensor, keys: Tensor, values: Tensor, mask_BL: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend with one token a sequence to keys and values `[B, K, L, d]`; the heads that share a key go as one."""
    rows, heads, width = query_BHD.shape
    query = query_BHD.reshape(rows, keys.shape[1], heads // keys.shape[1], width).to(keys.dtype)
    mask = None if mask_BL is None else mask_BL[:, None, None, :]
    with torch.autocast(query.device.type, enabled=False):  # it would turn all that is held into 16 bits, each step
        attended = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, width).to(query_BHD.dtype)


def _held_dtype(states: Tensor) -> torch.dtype:
    """Return the type to hold keys and values in: float32 for 16 bits on a CPU, whose attention is 4 times slower."""
    is_reduced = states.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_reduced and states.device.type == "cpu" else states.dtype


def _distinct(prompt_ids: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[int]]:
    """Return the prompts without those that are like the one before, and for each prompt its place among these."""
    distinct: list[Sequence[int]] = []
    of_row = []
    for ids in prompt_ids:
        if not distinct or list(ids) != list(distinct[-1]):
            distinct.append(ids)
        of_row.append(len(distinct) - 1)
    return distinct, of_row
