"""Turns prompts and responses into model inputs; masks come from lengths, never from token ids.

`in_common_shapes` pads batches to a few common shapes, so that CUDA graphs can replay the batches' forward and backward
passes. `in_common_shapes` appends padding sequences after the real sequences, and pads the states, the targets and the
rows of the tables `[B, T]`. The losses read no result of the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_rlhf.models.common_sizes import filled_size, update_sizes
from ppo_rlhf.models.packed_attention import PackedLayout, place_rows
from ppo_rlhf.models.token_rows import TokenRows, joined_rows, token_parts


@dataclass(frozen=True)
class SequenceBatch:
    """B prompts with their responses of T columns, ready for a forward pass.

    The N real tokens of all rows are packed one after the other. M of the N packed tokens are states: s_0 (each
    prompt's last token) to s_T (each response's last token). Each of the R response tokens is predicted by the state
    before the token. Further states may follow the M states, and further targets the R targets, so that forward passes
    have few shapes; the results of further states and targets are dropped.
    """

    rows: TokenRows  # token rows: each prompt followed by its response, padded on the right
    shape: tuple[int, int]  # batch size B and longest response T
    state_positions: Tensor  # [M or more] long, index of each state among the batch's N real tokens, row by row
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
    rows = joined_rows([(prompts, prompt_lengths), (targets, lengths)], pad_token_id, fill=fill)
    is_state = nn.functional.pad(is_response, (1, 0), value=True)  # [B, T + 1]
    is_state_token = (rows.position_ids >= prompt_lengths[:, None] - 1).take(rows.slots)
    predicts = nn.functional.pad(is_response, (0, 1), value=False).masked_select(is_state)
    states, predicting = _indices(is_state_token), _indices(predicts)
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
        response_slots=_indices(is_response.flatten()),
        state_slots=_indices(is_state.flatten()),
    )


def _indices(mask: Tensor) -> Tensor:
    """Return the indices `[n]` at which a mask `[size]` is True."""
    return mask.nonzero()[:, 0]


def _filled(indices: Tensor, available: int) -> Tensor:
    """Append unused indices below `available` until there are `filled_size` indices or no unused index is left."""
    is_free = torch.ones(available, dtype=torch.bool)
    is_free[indices] = False
    return torch.cat([indices, _indices(is_free)[: filled_size(len(indices)) - len(indices)]])


def in_common_shapes(batch: SequenceBatch, columns: int) -> SequenceBatch:
    """Pad a batch, which is on the CPU and was made without `fill`, to shapes that many batches share.

    The batch's tables `[B, T]` get `columns` columns; `columns` must be the same for all batches of a run, and at least
    the longest response. The padding rows follow the real rows. The returned batch lacks the token ids in padded form,
    so the models must compute packed sequences (`forward.packs`).
    """
    (rows, width), layout = batch.shape, batch.rows.layout
    tokens, responses, states = len(layout.slots), len(batch.response_slots), len(batch.state_slots)
    size = update_sizes(rows, responses, tokens, layout.shape[1])

    lengths: list[int] = layout.starts.diff().tolist()
    missing = size.tokens - tokens
    lengths += [min(size.longest, missing - done) for done in range(0, missing, size.longest)]
    lengths += [0] * (size.sequences - len(lengths))

    is_free = torch.ones(size.tokens, dtype=torch.bool)
    is_free[batch.state_positions] = False
    other_tokens = is_free.nonzero()[: size.states - states, 0]
    fillers = size.responses - responses
    shape = size.rows - (-size.spare_responses // columns), columns
    empty = torch.empty(0, dtype=torch.long)
    return SequenceBatch(
        rows=TokenRows(
            input_ids=empty,
            attention_mask=empty,
            position_ids=empty,
            packed_ids=_longer(batch.rows.packed_ids, missing),
            packed_positions=_longer(batch.rows.packed_positions, missing),
            layout=PackedLayout.of(lengths, size.longest),
            slots=empty,
        ),
        shape=shape,
        state_positions=torch.cat([batch.state_positions, other_tokens]),
        predicting=torch.cat([batch.predicting, torch.arange(states, states + fillers)]),
        targets=_longer(batch.targets, fillers),
        response_slots=_placed(batch.response_slots, width, columns, size.rows, fillers),
        state_slots=_placed(batch.state_slots, width + 1, columns + 1, size.rows, size.states - states),
    )


def _longer(values: Tensor, more: int) -> Tensor:
    return nn.functional.pad(values, (0, more))


def _placed(slots: Tensor, width: int, columns: int, rows: int, fillers: int) -> Tensor:
    """Convert flattened indices in a table of `width` columns to flattened indices in a table of `columns` columns.

    The returned indices end with the indices of `fillers` padding entries, which begin after the first `rows` rows.
    """
    first_filler = rows * columns
    return torch.cat([slots // width * columns + slots % width, torch.arange(first_filler, first_filler + fillers)])
