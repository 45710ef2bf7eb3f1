"""Token sequences as a model takes them: padded, or one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_rlhf.models.packed_attention import PackedLayout, rounded_up


@dataclass(frozen=True)
class TokenRows:
    """B sequences as a model takes them, in both forms.

    Padded: `[B, S]`, padding on either side. Packed: `[1, N + n]`, one sequence behind the other. Behind the last one
    there are n tokens of no sequence, unless all sequences are of one length: so that N + n is one of few numbers
    (`rounded_up`).
    """

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S] long, 1 on real tokens
    position_ids: Tensor  # [B, S]
    packed_ids: Tensor  # [1, N + n]
    packed_positions: Tensor  # [1, N + n]
    layout: PackedLayout
    slots: Tensor  # [N] long, place of each real token in the padded form, flattened

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> TokenRows:
        """Take the padded form; on the CPU, or this waits for the device."""
        slots = attention_mask.flatten().nonzero()[:, 0]
        lengths: list[int] = attention_mask.sum(-1).tolist()
        more = 0 if min(lengths) == max(lengths) else rounded_up(len(slots)) - len(slots)
        longer = torch.cat([slots, slots[-1:].expand(more)])  # the last token over and over: a valid id and position
        ids, positions = (values.flatten()[longer][None] for values in (input_ids, position_ids))
        layout = PackedLayout.of(lengths, input_ids.device, more=more)
        return cls(input_ids, attention_mask, position_ids, ids, positions, layout, slots)

    def to(self, device: torch.device) -> TokenRows:
        """Return the same on another device."""
        tensors = (self.input_ids, self.attention_mask, self.position_ids, self.packed_ids, self.packed_positions)
        return TokenRows(*(tensor.to(device) for tensor in tensors), self.layout.to(device), self.slots.to(device))


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> TokenRows:
    """Return sequences of token ids, padded on the right."""
    width = max(len(ids) for ids in sequences)
    lengths = torch.tensor([len(ids) for ids in sequences])
    ids = torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in sequences])
    mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
    return TokenRows.of(ids, mask, torch.arange(width).expand(len(sequences), width))
