"""Token sequences as a model takes them: padded, or packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ppo_rlhf.models.packed_attention import PackedLayout


@dataclass(frozen=True)
class TokenRows:
    """B sequences as a model takes them, in both forms.

    Padded: `[B, S]`, padding on either side. Packed: `[1, N]`, one sequence after the other.
    """

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S] long, 1 on real tokens
    position_ids: Tensor  # [B, S]
    packed_ids: Tensor  # [1, N]
    packed_positions: Tensor  # [1, N]
    layout: PackedLayout
    slots: Tensor  # [N] long, place of each real token in the padded form, flattened

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> TokenRows:
        """Take the padded form, which is on the CPU."""
        slots = attention_mask.flatten().nonzero()[:, 0]
        lengths: list[int] = attention_mask.sum(-1).tolist()
        ids, positions = (values.flatten()[slots][None] for values in (input_ids, position_ids))
        layout = PackedLayout.of(lengths, input_ids.device)
        return cls(input_ids, attention_mask, position_ids, ids, positions, layout, slots)

    def to(self, device: torch.device) -> TokenRows:
        """Return the same rows on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "layout"}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return TokenRows(layout=self.layout.to(device), **moved)


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> TokenRows:
    """Return sequences of token ids, padded on the right."""
    width = max(len(ids) for ids in sequences)
    lengths = torch.tensor([len(ids) for ids in sequences])
    ids = torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in sequences])
    mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
    return TokenRows.of(ids, mask, torch.arange(width).expand(len(sequences), width))
