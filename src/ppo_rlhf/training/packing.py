"""Prompts and responses as the padded tensors that a model takes. Masks come from lengths, never from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LeftPadded:
    """Prompts `[B, P]`, padded on the left so that all end in the last column."""

    input_ids: Tensor
    attention_mask: Tensor  # [B, P] long, 1 on real tokens
    position_ids: Tensor  # [B, P] long, 0 on padding


@dataclass(frozen=True)
class PackedSequences:
    """Prompts and responses side by side, `[B, P + T]`: left-padded prompts, right-padded responses."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_ids: Tensor  # [B, T]
    is_response: Tensor  # [B, T] bool, True on real response tokens


def left_pad(prompt_ids: Sequence[Sequence[int]], pad_token_id: int, device: torch.device | str = "cpu") -> LeftPadded:
    """Pad prompts of different lengths on the left."""
    lengths = torch.tensor([len(ids) for ids in prompt_ids])
    width = int(lengths.max())
    rows = [[pad_token_id] * (width - len(ids)) + list(ids) for ids in prompt_ids]
    attention_mask = (torch.arange(width)[None, :] >= (width - lengths)[:, None]).long()
    return LeftPadded(
        torch.tensor(rows, device=device), attention_mask.to(device), positions(attention_mask).to(device)
    )


def positions(attention_mask: Tensor) -> Tensor:
    """Return position ids `[B, S]`: 0 for the first real token of each row and for padding before it."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def without_padding(response_ids: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return the tokens of right-padded responses `[B, T]` as B lists of their lengths `[B]`."""
    return [row[:length] for row, length in zip(response_ids.tolist(), lengths.tolist(), strict=True)]


def pack(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Tensor,
    lengths: Tensor,
    pad_token_id: int,
    device: torch.device | str = "cpu",
) -> PackedSequences:
    """Put prompts and responses side by side, trimmed to the longest prompt and response of these rows.

    Args:
        prompt_ids: B prompts as token ids.
        response_ids: `[B, T]` long; what stands behind each length is ignored.
        lengths: `[B]` long, tokens in each response, at least 1.
        pad_token_id: Any id inside the vocabulary.
        device: Where the result lies.
    """
    prompts = left_pad(prompt_ids, pad_token_id)
    width = int(lengths.max())
    is_response = torch.arange(width)[None, :] < lengths.cpu()[:, None]
    responses = torch.where(is_response, response_ids.cpu()[:, :width], pad_token_id)
    attention_mask = torch.cat([prompts.attention_mask, is_response.long()], dim=1)
    return PackedSequences(
        torch.cat([prompts.input_ids, responses], dim=1).to(device),
        attention_mask.to(device),
        positions(attention_mask).to(device),
        responses.to(device),
        is_response.to(device),
    )
