"""Token sequences as a model takes them: padded, or packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_rlhf.models.packed_attention import PackedLayout
from ppo_rlhf.models.transfers import to_device

LEAST_FILL = 64
"""Tokens: packed rows that are filled up have a multiple of it. Kernels for 16 bits are chosen anew for each shape: on
an H100 this takes a millisecond, and a matrix product of a small model 0.02 of it (docs/speed.md)."""


@dataclass(frozen=True)
class TokenRows:
    """B sequences as a model takes them, in both forms.

    Padded: `[B, S]`, padding on either side. Packed: `[1, N]`, one sequence after the other; fillers may follow, which
    are sequences that nothing reads.
    """

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S] long, 1 on real tokens
    position_ids: Tensor  # [B, S]
    packed_ids: Tensor  # [1, N or more]
    packed_positions: Tensor  # [1, N or more]
    layout: PackedLayout  # with the fillers
    slots: Tensor  # [N] long, place of each real token in the padded form, flattened

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *, fill: bool = False) -> TokenRows:
        """Take the padded form, which is on the CPU; `fill` adds fillers, so that few shapes occur (`filled_size`)."""
        slots = attention_mask.flatten().nonzero()[:, 0]
        lengths: list[int] = attention_mask.sum(-1).tolist()
        ids, positions = (values.flatten()[slots][None] for values in (input_ids, position_ids))
        missing = filled_size(len(slots)) - len(slots) if fill else 0
        if missing:  # no filler is longer than the longest sequence: attention stays as wide, and positions as they are
            fillers = [min(max(lengths), missing - done) for done in range(0, missing, max(lengths))]
            ids = torch.cat([ids, ids.new_zeros(1, missing)], dim=1)
            positions = torch.cat([positions, *(torch.arange(length)[None] for length in fillers)], dim=1)
            lengths += fillers
        return cls(input_ids, attention_mask, position_ids, ids, positions, PackedLayout.of(lengths), slots)

    def to(self, device: torch.device) -> TokenRows:
        """Return the same rows on another device."""
        return to_device([self], device)[0]


def few_shapes_are_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels are made anew for each shape, so that rows are filled up.

    That is so on accelerators, and by oneDNN for matrix products of 16 bits on a processor (docs/speed.md).
    """
    return device.type != "cpu" or dtype.itemsize == 2


def filled_size(count: int) -> int:
    """Return the next size that filled rows have: at most 16 sizes from one power of 2 to the next."""
    step = max(LEAST_FILL, 2 ** (count.bit_length() - 5))
    return -(-count // step) * step


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int, *, fill: bool = False) -> TokenRows:
    """Return sequences of token ids, padded on the right; `fill` is as in `TokenRows.of`."""
    width = max(len(ids) for ids in sequences)
    lengths = torch.tensor([len(ids) for ids in sequences])
    ids = torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in sequences])
    mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
    return TokenRows.of(ids, mask, torch.arange(width).expand(len(sequences), width), fill=fill)
