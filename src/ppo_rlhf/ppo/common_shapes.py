"""Batches in shapes that few batches share: their passes are the same work on a device, so that CUDA can replay it.

Only the data is filled up, with what nothing reads: sequences behind the real ones, states and targets taken from
other tokens, and rows of the tables `[B, T]` that count nowhere. No model knows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppo_rlhf.models.packed_attention import PackedLayout
from ppo_rlhf.models.token_rows import LEAST_FILL, TokenRows
from ppo_rlhf.ppo.batch import SequenceBatch

LEAST_WIDTH = 16
"""Tokens: the padded form of attention has a multiple of it in a row."""


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
