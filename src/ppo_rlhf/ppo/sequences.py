"""Prompts and responses as the tensors that a model takes; masks come from lengths, never from token ids.

In common shapes few batches share theirs: their passes are the same work on a device, so that CUDA can replay it. Only
the data is filled up then, with what nothing reads: sequences behind the real ones, states and targets taken from other
tokens, and rows of the tables `[B, T]` that count nowhere. No model knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_rlhf.models.packed_attention import PackedLayout, place_rows
from ppo_rlhf.models.token_rows import LEAST_FILL, TokenRows, filled_size, joined_rows, token_parts

LEAST_WIDTH = 16
"""Tokens: the padded form of attention has a multiple of it in a row."""


@dataclass(frozen=True)
class SequenceBatch:
    """B prompts with their responses of T columns, ready for a forward pass.

    The N real tokens of all rows follow each other. Of these the M states are s_0 (each prompt's last token) to
    s_T (each response's last token), and the R response tokens follow the states that predict them. More states may
    follow the M, and more predicting ones the R, so that few shapes occur: nothing reads what is computed for them.
    """

    rows: TokenRows  # each prompt followed by its response, padded on the right
    shape: tuple[int, int]  # B, T
    state_positions: Tensor  # [M or more] long, indices of the states among the N real tokens, row by row
    predicting: Tensor  # [R or more] long, indices among the M states of those that a response token follows
    targets: Tensor  # [R or more] long, the response tokens
    response_slots: Tensor  # [R] long, places of the response tokens in [B, T], flattened
    state_slots: Tensor  # [M] long, places of the states in [B, T + 1], flattened

    def scatter_responses(self, values_R: Tensor) -> Tensor:
        """Return values of the response tokens, row by row, as `[B, T]` with 0 in the padding."""
        return place_rows(values_R, self.response_slots, *self.shape)

    def scatter_states(self, values_M: Tensor) -> Tensor:
        """Return values of the states, row by row, as `[B, T + 1]` with 0 in the padding."""
        rows, width = self.shape
        return place_rows(values_M, self.state_slots, rows, width + 1)


def without_padding(response_ids: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return the tokens of right-padded responses `[B, T]` as B lists of their lengths `[B]`."""
    return [row[:length] for row, length in zip(response_ids.tolist(), lengths.tolist(), strict=True)]


def make_batch(
    prompt_ids: Sequence[Sequence[int]], response_ids: Tensor, lengths: Tensor, pad_token_id: int, *, fill: bool = False
) -> SequenceBatch:
    """Put each response after its prompt, trimmed to the longest response of these rows, on the CPU.

    Of the responses `[B, T]` the first `lengths`, `[B]` and at least 1, are read. The pad token is any of the
    vocabulary. `fill`: tokens, states and targets are filled up to a size that other batches have, too.
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
    """Return the indices followed by others below `available`, none twice, up to a size of `filled_size` if it can."""
    is_free = torch.ones(available, dtype=torch.bool)
    is_free[indices] = False
    return torch.cat([indices, _indices(is_free)[: filled_size(len(indices)) - len(indices)]])


def in_common_shapes(batch: SequenceBatch, columns: int) -> SequenceBatch:
    """Return the same sequences, which are on the CPU and not filled up, in shapes that few batches share.

    Tables get `columns`, at least those of the batch; those of all batches of a run. The real rows come first. The
    padded form of the tokens is left out, so the models must pack.
    """
    (rows, width), layout = batch.shape, batch.rows.layout
    tokens, responses, states = len(layout.slots), len(batch.response_slots), len(batch.state_slots)
    all_rows, all_responses = _size(rows, 2), _size(responses, 4, LEAST_FILL)
    all_states = all_responses + all_rows
    all_tokens, longest = _size(max(tokens, all_states), 8, LEAST_FILL), _size(layout.shape[1], 4, LEAST_WIDTH)
    # what is missing is less than these, whatever the batch: each row has a state more than response tokens
    spare_responses = _step(all_responses, 4, LEAST_FILL) + all_rows
    spare_tokens = _step(all_tokens, 8, LEAST_FILL) + spare_responses
    all_sequences = all_rows - (-spare_tokens // longest)

    lengths: list[int] = layout.starts.diff().tolist()
    missing = all_tokens - tokens
    lengths += [min(longest, missing - done) for done in range(0, missing, longest)]
    lengths += [0] * (all_sequences - len(lengths))

    is_free = torch.ones(all_tokens, dtype=torch.bool)
    is_free[batch.state_positions] = False
    other_tokens = is_free.nonzero()[: all_states - states, 0]
    fillers = all_responses - responses
    tables = all_rows - (-spare_responses // columns), columns
    left_out = torch.empty(0, dtype=torch.long)
    return SequenceBatch(
        rows=TokenRows(
            input_ids=left_out,
            attention_mask=left_out,
            position_ids=left_out,
            packed_ids=_longer(batch.rows.packed_ids, missing),
            packed_positions=_longer(batch.rows.packed_positions, missing),
            layout=PackedLayout.of(lengths, longest),
            slots=left_out,
        ),
        shape=tables,
        state_positions=torch.cat([batch.state_positions, other_tokens]),
        predicting=torch.cat([batch.predicting, torch.arange(states, states + fillers)]),
        targets=_longer(batch.targets, fillers),
        response_slots=_placed(batch.response_slots, width, columns, all_rows, fillers),
        state_slots=_placed(batch.state_slots, width + 1, columns + 1, all_rows, all_states - states),
    )


def _size(count: int, an_octave: int, least: int = 1) -> int:
    """Return the next of so many sizes between a power of 2 and the next; all are multiples of the least."""
    step = _step(count, an_octave, least)
    return -(-count // step) * step


def _step(count: int, an_octave: int, least: int) -> int:
    return max(least, 2 ** (count.bit_length() - 1) // an_octave)


def _longer(values: Tensor, more: int) -> Tensor:
    return nn.functional.pad(values, (0, more))


def _placed(slots: Tensor, width: int, columns: int, rows: int, fillers: int) -> Tensor:
    """Return places in a table of more columns, and those of the fillers, one after the other behind so many rows."""
    behind = rows * columns
    return torch.cat([slots // width * columns + slots % width, torch.arange(behind, behind + fillers)])
