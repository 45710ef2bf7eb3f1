"""Prompts and responses as the tensors that a model takes. Masks come from lengths, never from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ppo_rlhf.models.packed_attention import place_rows
from ppo_rlhf.models.token_rows import TokenRows


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

    @cached_property
    def rows(self) -> TokenRows:
        """The same as a model takes it, with or without padding."""
        return TokenRows.of(self.input_ids, self.attention_mask, self.position_ids)

    @cached_property
    def is_state(self) -> Tensor:
        """`[B, T + 1]` bool, True on the states s_0 (the prompt) to s_T (behind the last response token)."""
        return torch.cat([torch.ones_like(self.is_response[:, :1]), self.is_response], dim=1)

    @cached_property
    def states(self) -> Tensor:
        """`[M]` long, which of the N real tokens are such states, row by row: the last of each prompt and responses."""
        columns = torch.zeros_like(self.attention_mask, dtype=torch.bool)
        columns[:, -self.is_state.shape[1] :] = self.is_state
        return columns.flatten()[self.attention_mask.flatten().bool()].nonzero()[:, 0]

    @cached_property
    def predicting(self) -> Tensor:
        """`[R]` long, which of the M states have a next response token: all but each row's last."""
        has_next = torch.cat([self.is_response, torch.zeros_like(self.is_response[:, :1])], dim=1)
        return has_next[self.is_state].nonzero()[:, 0]

    @cached_property
    def targets(self) -> Tensor:
        """`[R]` long, those next tokens."""
        return self.response_ids[self.is_response]

    @cached_property
    def _response_slots(self) -> Tensor:
        return self.is_response.flatten().nonzero()[:, 0]

    @cached_property
    def _state_slots(self) -> Tensor:
        return self.is_state.flatten().nonzero()[:, 0]

    def of_responses(self, values_R: Tensor) -> Tensor:
        """Return values of the response tokens, row by row, as `[B, T]` with 0 in the padding."""
        return place_rows(values_R, self._response_slots, self.is_response.numel()).view(self.is_response.shape)

    def of_states(self, values_M: Tensor) -> Tensor:
        """Return values of the states, row by row, as `[B, T + 1]` with 0 in the padding."""
        return place_rows(values_M, self._state_slots, self.is_state.numel()).view(self.is_state.shape)

    def to(self, device: torch.device | str) -> PackedSequences:
        """Return the same, that lies on the CPU, elsewhere; what comes of masks is worked out before: nothing waits."""
        device = torch.device(device)
        if device == self.input_ids.device:
            return self
        plain = (self.input_ids, self.attention_mask, self.position_ids, self.response_ids, self.is_response)
        moved = PackedSequences(*(tensor.to(device, non_blocking=True) for tensor in plain))
        for name in ("rows", "is_state", "states", "predicting", "targets", "_response_slots", "_state_slots"):
            part = getattr(self, name)
            moved.__dict__[name] = (
                part.to(device) if isinstance(part, TokenRows) else part.to(device, non_blocking=True)
            )
        return moved


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
        torch.cat([prompts.input_ids, responses], dim=1),
        attention_mask,
        positions(attention_mask),
        responses,
        is_response,
    ).to(device)
