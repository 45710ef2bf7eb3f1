"""Keys and values of sequences that are being decoded, each from column 0 on: no padding on the left, rows that end go.

Transformers' caches give all rows one length, so prompts of different lengths need padding that every step attends to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.forward import backbone_of, logits_of, packed_states_at, packs
from ppo_rlhf.models.packed_attention import PackedLayout, as_autocast, packed_states
from ppo_rlhf.models.probe import WHATEVER_A_MODEL_RAISES, are_close, asking, some_ids, states_alone
from ppo_rlhf.models.products.compiled_shapes import fills_rows

if TYPE_CHECKING:
    from ppo_rlhf.models.passes.recorded_steps import RecordedSteps

log = logging.getLogger(__name__)

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
        recorded: RecordedSteps | None = None,
    ) -> None:
        """Take a model that packs (`trunks.packs`), the prompts, and how long a sequence can get.

        `head` gives the logits of states; None finds out which does. `recorded` are the model's steps, to be replayed;
        None computes each one anew. They serve one decoder at a time.
        """
        self._model, self._backbone, self._head = model, backbone_of(model), head or logits_of(model)
        self._keys: list[Tensor] = []  # of each time that a pass attends, [slots, heads, capacity, d]
        self._values: list[Tensor] = []
        self._longest = longest
        self._recorded = recorded
        self._prompt_ids = prompt_ids
        self._columns = [len(ids) for ids in prompt_ids]
        self.lengths = torch.tensor(self._columns, device=model.device)

    def prefill(self) -> Tensor:
        """Return the logits `[B, V]` that follow the prompts; equal prompts that stand together are computed once."""
        device = self._model.device
        distinct, of_row = _distinct(self._prompt_ids)
        lengths = [len(ids) for ids in distinct]
        layout = PackedLayout.of(lengths, device, fill=fills_rows(self._backbone))
        tokens = [token for ids in distinct for token in ids] + [distinct[-1][-1]] * layout.more
        after = torch.zeros(layout.more, dtype=torch.long)
        positions = torch.cat([*(torch.arange(length) for length in lengths), after])
        prefill = Prefill(layout, self._keys, self._values, max(lengths), self._capacity(max(lengths) + 1))
        ids = torch.tensor([tokens], device=device)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self._head(packed_states_at(self._backbone, ids, positions[None].to(device), prefill, last))
        if len(distinct) < len(self._prompt_ids):
            index = torch.tensor(of_row, device=device)
            logits = logits.index_select(0, index)
            for held in (self._keys, self._values):
                for turn, tensor in enumerate(held):
                    held[turn] = tensor.index_select(0, index)
        if self._recorded is not None:
            taken = self._recorded.take_over(self._keys, self._values, self.lengths, self._longest)
            self._keys, self._values, self.lengths = taken
        return logits

    def step(self, token_ids: Tensor) -> Tensor:
        """Take one token of each sequence, `[B]`, and return the logits `[B, V]` that follow it."""
        width = max(self._columns) + 1
        if self._recorded is not None:
            logits = self._recorded.step(token_ids, width)
        else:
            self._make_room(width)
            is_even = min(self._columns) == width - 1
            attention = HeldColumns.of(self._keys, self._values, self.lengths, width, is_even=is_even)
            logits = self._head(packed_states(self._backbone, token_ids[None], self.lengths[None], attention))
        self.lengths += 1
        self._columns = [length + 1 for length in self._columns]
        return logits

    @property
    def turns(self) -> int:
        """How often a pass attends; known after the prefill, 0 where a model has attention of its own."""
        return len(self._keys)

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
                for tensor in held:
                    tensor[slots, :, :width] = tensor[formers, :, :width]
            self.lengths[slots] = self.lengths[formers]
        self.lengths = self.lengths[: len(live)]
        self._columns = [self._columns[row] for row in order]
        return order

    def _capacity(self, columns: int) -> int:
        return min(self._longest, in_buckets(columns))

    def _make_room(self, width: int) -> None:
        """Let every sequence have so many columns."""
        for held in (self._keys, self._values):
            for turn, tensor in enumerate(held):
                if tensor.shape[2] < width:
                    more = self._capacity(width) - tensor.shape[2]
                    held[turn] = nn.functional.pad(tensor[: len(self._columns)], (0, 0, 0, more))


_decodes: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def decodes(model: PreTrainedModel) -> bool:
    """Whether a `Decoder` gives the states that whole passes do; the model is asked at the first call."""
    if model not in _decodes:
        _decodes[model] = packs(backbone_of(model)) and _decodes_like_whole_passes(model)
        if not _decodes[model]:
            log.info("%s is decoded over transformers' cache, which takes longer.", type(model).__name__)
    return _decodes[model]


def caches_keys(model: PreTrainedModel) -> bool:
    """Ask a model whether it returns transformers' cache of keys and values: Mamba has another one, GPT-1 none."""
    with asking(model):
        output = model(input_ids=some_ids(model, 1)[None].to(model.device), use_cache=True)
    return getattr(output, "past_key_values", None) is not None


def _decodes_like_whole_passes(model: PreTrainedModel) -> bool:
    """Ask the model for two steps behind prompts of two lengths, and for each sequence alone."""
    backbone, sequences, steps = backbone_of(model), [some_ids(model, 7), some_ids(model, 5).flip(0)], 2
    decoder = Decoder(model, [ids[:-steps].tolist() for ids in sequences], 7, head=nn.Identity())
    try:
        with asking(model):
            found = [decoder.prefill()]
            for step in range(-steps, 0):
                found.append(decoder.step(torch.stack([ids[step] for ids in sequences]).to(model.device)))
            alone = [states_alone(backbone, ids) for ids in sequences]
    except WHATEVER_A_MODEL_RAISES:
        return False
    expected = torch.stack([states[-steps - 1 :] for states in alone], dim=1)
    return are_close(torch.stack(found), expected)


@dataclass(frozen=True)
class Prefill:
    """Attention among prompts, which remembers their keys and values; see `packed_attention.Attention`.

    Attributes:
        layout: Of B prompts.
        keys: `[B, K, capacity, d]` of each time that the pass attends, filled here.
        values: Likewise.
        length: Tokens of the longest prompt.
        capacity: Columns to make room for.
    """

    layout: PackedLayout
    keys: list[Tensor]
    values: list[Tensor]
    length: int
    capacity: int

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Attend within each prompt."""
        self.keys.append(self._store(self.layout.spread(as_autocast(key_NKD))))
        self.values.append(self._store(self.layout.spread(as_autocast(value_NKD))))
        return self.layout.attend(query_NHD, key_NKD, value_NKD, scaling)

    def _store(self, spread_BLKD: Tensor) -> Tensor:
        """Return memory `[B, K, capacity, d]` that begins with these columns."""
        rows, _, heads, width = spread_BLKD.shape
        memory = spread_BLKD.new_zeros(rows, heads, self.capacity, width, dtype=_held_dtype(spread_BLKD))
        memory[:, :, : self.length] = spread_BLKD[:, : self.length].transpose(1, 2)
        return memory


@dataclass(frozen=True)
class HeldColumns:
    """Attention of one token of each of B sequences to what is held of it; see `packed_attention.Attention`.

    For one pass.

    Attributes:
        keys: `[slots, K, capacity, d]` of each time that a pass attends; the first B slots are those of the sequences.
        values: Likewise.
        rows: 0 … B - 1, `[B]` long.
        lengths: Columns of each sequence so far, `[B]` long: its token's keys and values go behind them.
        width: Columns that are looked at.
        mask: `[B, width]`, True where to attend; None: everywhere.
        turns: Counts how often the pass has attended. Not the layers: some attend twice, some come again.
    """

    keys: list[Tensor]
    values: list[Tensor]
    rows: Tensor
    lengths: Tensor
    width: int
    mask: Tensor | None
    turns: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, keys: list[Tensor], values: list[Tensor], lengths: Tensor, width: int, *, is_even: bool) -> HeldColumns:
        """Return the attention to at most `width` columns, the new ones included; `is_even`: of all that many."""
        rows, columns = (torch.arange(size, device=lengths.device) for size in (len(lengths), width))
        return cls(keys, values, rows, lengths, width, None if is_even else columns <= lengths[:, None])

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float | None) -> Tensor:
        """Remember keys and values and attend to all that came before."""
        turn = next(self.turns)
        keys, values = self.keys[turn][: len(query_NHD)], self.values[turn][: len(query_NHD)]
        keys[self.rows, :, self.lengths] = as_autocast(key_NKD).to(keys.dtype)
        values[self.rows, :, self.lengths] = as_autocast(value_NKD).to(values.dtype)
        held = keys[:, :, : self.width], values[:, :, : self.width]
        return _attend_to_held(as_autocast(query_NHD), *held, self.mask, scaling)


def _attend_to_held(
    query_BHD: Tensor, keys: Tensor, values: Tensor, mask_BL: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend with one token a sequence to keys and values `[B, K, L, d]`; the heads that share a key go as one."""
    rows, heads, width = query_BHD.shape
    query = query_BHD.reshape(rows, keys.shape[1], heads // keys.shape[1], width).to(keys.dtype)
    mask = None if mask_BL is None else mask_BL[:, None, None, :]
    with torch.autocast(query.device.type, enabled=False):  # it would turn all that is held into 16 bits, each step
        attended = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, values.shape[-1]).to(query_BHD.dtype)


def _held_dtype(states: Tensor) -> torch.dtype:
    """Return the type to hold keys and values in: float32 for 16 bits on a CPU, whose attention is 4 times slower."""
    is_reduced = states.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_reduced and states.device.type == "cpu" else states.dtype


def in_buckets(columns: int) -> int:
    """Return a number of columns rounded up to whole buckets."""
    return -(-columns // BUCKET) * BUCKET


def _distinct(prompt_ids: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[int]]:
    """Return the prompts without those that are like the one before, and for each prompt its place among these."""
    distinct: list[Sequence[int]] = []
    of_row = []
    for ids in prompt_ids:
        if not distinct or list(ids) != list(distinct[-1]):
            distinct.append(ids)
        of_row.append(len(distinct) - 1)
    return distinct, of_row
