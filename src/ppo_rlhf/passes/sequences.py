"""Turns prompts and responses into model inputs; masks come from lengths, never from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_rlhf.passes.packed_attention import place_rows
from ppo_rlhf.passes.prefixes import shared_prefix
from ppo_rlhf.passes.token_rows import TokenRows, filled_size, joined_rows, token_parts, true_indices


@dataclass(frozen=True)
class SequenceBatch:
    """B prompts with their responses of T columns, ready for a forward pass.

    The N tokens of all rows are packed one after the other; a beginning that prompts share is packed once. M of the N
    packed tokens are states: s_0 (each prompt's last token) to s_T (each response's last token). Each of the R response
    tokens is predicted by the state before the token. Further states may follow the M states, and further targets the R
    targets, so that forward passes have few shapes; the results of further states and targets are dropped.
    """

    rows: TokenRows  # token rows: each prompt followed by its response, padded on the right
    shape: tuple[int, int]  # batch size B and longest response T
    state_positions: Tensor  # [M or more] long, index of each state among the N packed tokens, row by row
    predicting: Tensor  # [R or more] long, for each response token, the index of the state that predicts the token
    targets: Tensor  # [R or more] long, the response tokens, which the states at `predicting` predict
    response_slots: Tensor  # [R] long, index of each response token in the flattened [B, T]
    state_slots: Tensor  # [M] long, index of each state in the flattened [B, T + 1]

    def scatter_responses(self, values_R: Tensor) -> Tensor:
        """Return values of the R response tokens as a table `[B, T]` with 0 in padding."""
        return place_rows(values_R, self.response_slots, *self.shape)

    def scatter_states(self, values_M: Tensor) -> Tensor:
        """Return values of the M states as a table `[B, T + 1]` with 0 in padding."""
        rows, width = self.shape
        return place_rows(values_M, self.state_slots, rows, width + 1)


def without_padding(response_ids: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return right-padded responses `[B, T]` of the given lengths `[B]` as B lists of tokens."""
    return [row[:length] for row, length in zip(response_ids.tolist(), lengths.tolist(), strict=True)]


def make_batch(
    prompt_ids: Sequence[Sequence[int]], response_ids: Tensor, lengths: Tensor, pad_token_id: int, *, fill: bool = False
) -> SequenceBatch:
    """Append each response to its prompt, and return the rows on the CPU, trimmed to the longest response.

    The packed rows have the prompts' common beginning once (`prefixes.shared_prefix`).

    Args:
        prompt_ids: B prompts.
        response_ids: Responses `[B, T]`; tokens beyond `lengths` are not read.
        lengths: Tokens of each response, `[B]`, at least 1.
        pad_token_id: Any token id of the vocabulary.
        fill: Whether to pad tokens, states and targets to one of a few common sizes.
    """
    lengths = lengths.cpu()
    is_response = torch.arange(int(lengths.max())) < lengths[:, None]
    targets = response_ids.cpu()[:, : is_response.shape[1]].masked_select(is_response)
    prompts, prompt_lengths = token_parts(prompt_ids)
    parts, prefix = [(prompts, prompt_lengths), (targets, lengths)], shared_prefix(prompt_ids)
    rows = joined_rows(parts, pad_token_id, prefix=prefix, fill=fill)
    is_state = nn.functional.pad(is_response, (1, 0), value=True)  # [B, T + 1]
    is_state_token = rows.attention_mask.bool() & (rows.position_ids >= prompt_lengths[:, None] - 1)
    predicts = nn.functional.pad(is_response, (0, 1), value=False).masked_select(is_state)
    states, predicting = rows.places().masked_select(is_state_token), true_indices(predicts)
    if fill:
        states = _filled(states, len(rows.slots))
        predicting = _filled(predicting, len(states))
        targets = nn.functional.pad(targets, (0, len(predicting) - len(targets)))
    return SequenceBatch(
        rows=rows,
        shape=(len(is_response), is_response.shape[1]),
        state_positions=states,
        predicting=predicting,
        targets=targets,
        response_slots=true_indices(is_response),
        state_slots=true_indices(is_state),
    )


def sequence_batches(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Tensor,
    lengths: Tensor,
    groups: list[list[int]],
    pad_token_id: int,
    *,
    fill: bool,
) -> list[SequenceBatch]:
    """Return each group of rows as model inputs on the CPU, trimmed to the longest response of the group.

    The arguments are those of `make_batch`, for all rows.
    """
    return [
        make_batch([prompt_ids[row] for row in rows], response_ids[rows], lengths[rows], pad_token_id, fill=fill)
        for rows in groups
    ]


def _filled(indices: Tensor, available: int) -> Tensor:
    """Append unused indices below `available` until there are `filled_size` indices or no unused index is left."""
    is_free = torch.ones(available, dtype=torch.bool)
    is_free[indices] = False
    return torch.cat([indices, true_indices(is_free)[: filled_size(len(indices)) - len(indices)]])
