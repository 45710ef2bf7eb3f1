"""Turns token sequences into inputs of a model: padded, or packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ppo_rlhf.passes.packed_attention import PackedLayout, SharedLayout
from ppo_rlhf.passes.prefixes import Prefix
from ppo_rlhf.passes.transfers import to_device

LEAST_FILL = 64
"""Packed rows with fillers have a multiple of this many tokens, so that few shapes occur. The libraries choose a 16-bit
kernel for each new shape: on an H100 the choice takes 1 ms, and a matrix product of a small model 0.02 ms
(docs/speed.md)."""


def few_shapes_are_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether each new shape costs time to choose a kernel, so that packed rows should get fillers.

    New shapes cost time on accelerators, and on CPUs for 16-bit matrix products, which oneDNN computes (docs/speed.md).
    """
    return device.type != "cpu" or dtype.itemsize == 2


def common_size(count: int, multiple_of: int) -> int:
    """Round `count` up to a size that many batches share: a multiple of `multiple_of`, and one of at most 16 evenly
    spaced sizes from one power of 2 to the next.

    So the number of sizes is at most 16 times the binary logarithm of the largest count.
    """
    step = max(multiple_of, 2 ** (count.bit_length() - 1) // 16)
    return -(-count // step) * step


def filled_size(count: int) -> int:
    """Return the number of tokens that packed rows of `count` tokens have with fillers."""
    return common_size(count, LEAST_FILL)


@dataclass(frozen=True)
class TokenRows:
    """B sequences as inputs of a model, in two forms.

    Padded token rows are `[B, S]`, with padding on either side. Packed token rows are `[1, N]`, one sequence after the
    other. If rows share a prefix, packed token rows have the prefix once: first the tokens after the prefix of the rows
    that share it, then the prefix, then the other rows. Packed token rows may end with fillers, which are sequences
    whose results are not used.
    """

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S] long, 1 on real tokens, 0 in padding
    position_ids: Tensor  # [B, S]
    packed_ids: Tensor  # [1, N or more]
    packed_positions: Tensor  # [1, N or more]
    layout: PackedLayout | SharedLayout  # layout of the sequences in the packed form, including the filler sequences
    slots: Tensor  # [N] long, index of each token of the packed form in the flattened padded form [B · S]

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        *,
        prefix: Prefix | None = None,
        fill: bool = False,
    ) -> TokenRows:
        """Make padded and packed rows from padded rows on the CPU.

        The packed rows have a `prefix` once, for which the rows must be padded on the right. `fill` adds fillers, so
        that few shapes occur.
        """
        lengths: list[int] = attention_mask.sum(-1).tolist()
        own: list[int] = []
        if prefix is None:
            slots = true_indices(attention_mask)
        else:
            shares = torch.zeros(len(lengths), 1, dtype=torch.bool)
            shares[prefix.rows] = True
            is_own = shares & (torch.arange(attention_mask.shape[1]) >= prefix.length)
            copy = prefix.rows[0] * attention_mask.shape[1] + torch.arange(prefix.length)
            slots = torch.cat([true_indices(attention_mask * is_own), copy, true_indices(attention_mask * ~shares)])
            own = [lengths[row] - prefix.length for row in prefix.rows]
            lengths = [length for length, (is_sharing,) in zip(lengths, shares.tolist(), strict=True) if not is_sharing]
        ids, positions = (values.take(slots)[None] for values in (input_ids, position_ids))
        missing = filled_size(len(slots)) - len(slots) if fill else 0
        # Fillers are at most as long as the longest sequence, so that attention and positions become no wider
        if missing:
            longest = max([prefix.length, *lengths] if prefix else lengths)
            fillers = [min(longest, missing - done) for done in range(0, missing, longest)]
            ids = torch.cat([ids, ids.new_zeros(1, missing)], dim=1)
            positions = torch.cat([positions, *(torch.arange(length)[None] for length in fillers)], dim=1)
            lengths += fillers
        return cls(
            input_ids,
            attention_mask,
            position_ids,
            packed_ids=ids,
            packed_positions=positions,
            layout=SharedLayout.of(prefix.length, own, lengths) if prefix else PackedLayout.of(lengths),
            slots=slots,
        )

    def places(self) -> Tensor:
        """Return the index of each token of the padded form in the packed form, `[B, S]` long, any in padding."""
        places = torch.full(self.attention_mask.shape, -1, device=self.slots.device)
        places.view(-1)[self.slots] = torch.arange(len(self.slots), device=self.slots.device)
        if isinstance(self.layout, PackedLayout):
            return places.clamp(min=0)
        in_prefix = len(self.layout.own.slots) + torch.arange(places.shape[1], device=places.device)
        return torch.where((places < 0) & self.attention_mask.bool(), in_prefix, places).clamp(min=0)

    def to(self, device: torch.device) -> TokenRows:
        """Return the same rows on another device."""
        return to_device([self], device)[0]


def right_padded(
    sequences: Sequence[Sequence[int]], pad_id: int, *, prefix: Prefix | None = None, fill: bool = False
) -> TokenRows:
    """Return token rows that are padded on the right; the packed form is as in `TokenRows.of`."""
    return joined_rows([token_parts(sequences)], pad_id, prefix=prefix, fill=fill)


def token_parts(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the token ids of B sequences one after the other, `[N]`, and their lengths `[B]`."""
    # np.fromiter is several times as fast as torch.tensor for a list of ints
    ids = np.fromiter(chain.from_iterable(sequences), dtype=np.int64)
    return torch.from_numpy(ids), torch.tensor([len(sequence) for sequence in sequences])


def joined_rows(
    parts: Sequence[tuple[Tensor, Tensor]], pad_id: int, *, prefix: Prefix | None = None, fill: bool = False
) -> TokenRows:
    """Return B rows, padded on the right; row b joins sequence b of every part, such as a prompt and its response.

    A part holds B sequences: their ids one after the other, `[N]`, and their lengths `[B]`, on the CPU. `prefix` and
    `fill` are as in `TokenRows.of`.
    """
    ends = torch.stack([lengths for _, lengths in parts]).cumsum(0)  # [parts, B]
    columns = torch.arange(int(ends[-1].max()))
    ids = torch.full((ends.shape[1], len(columns)), pad_id)
    is_before = torch.zeros(ids.shape, dtype=torch.bool)
    for (values, _), end in zip(parts, ends, strict=True):
        is_within = columns < end[:, None]
        ids.masked_scatter_(is_within & ~is_before, values)
        is_before = is_within
    return TokenRows.of(ids, is_before.long(), columns.expand(ids.shape), prefix=prefix, fill=fill)


def true_indices(mask: Tensor) -> Tensor:
    """Return the indices `[n]` in the flattened mask at which it is not 0."""
    return mask.flatten().nonzero()[:, 0]
