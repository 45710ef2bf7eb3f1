"""Rounds the sizes of batches to sizes that many batches share, so that few shapes are compiled or captured."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEAST_FILL = 64
"""Packed rows with fillers have a multiple of this many tokens, so that few shapes occur. The libraries choose a 16-bit
kernel for each new shape: on an H100 the choice takes 1 ms, and a matrix product of a small model 0.02 ms
(docs/speed.md)."""
LEAST_WIDTH = 16
"""The width of padded attention is a multiple of this many tokens."""
FEWEST_ROWS, FEWEST_COLUMNS = 16, 64
"""The smallest number of sequences and of KV cache columns of a captured decoding step."""


def few_shapes_are_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether each new shape costs time to choose a kernel, so that packed rows should get fillers.

    New shapes cost time on accelerators, and on CPUs for 16-bit matrix products, which oneDNN computes (docs/speed.md).
    """
    return device.type != "cpu" or dtype.itemsize == 2


def common_size(count: int, per_octave: int, multiple_of: int = 1) -> int:
    """Round `count` up to a size that many batches share: a multiple of `multiple_of`, and one of at most `per_octave`
    evenly spaced sizes from one power of 2 to the next.

    So the number of shapes is at most `per_octave` times the binary logarithm of the largest count.
    """
    step = size_step(count, per_octave, multiple_of)
    return -(-count // step) * step


def size_step(count: int, per_octave: int, multiple_of: int = 1) -> int:
    """Return the distance between the sizes of `common_size` around `count`."""
    return max(multiple_of, 2 ** (count.bit_length() - 1) // per_octave)


def filled_size(count: int) -> int:
    """Return the number of tokens that packed rows of `count` tokens have with fillers."""
    return common_size(count, 16, LEAST_FILL)


def captured_rows(needed: int) -> int:
    """Return the smallest number of sequences >= `needed` for which a step is captured: 16, 24, 32, 48, 64, …"""
    return common_size(max(needed, FEWEST_ROWS), 2)


def captured_columns(needed: int) -> int:
    """Return the smallest number of KV cache columns >= `needed` for which a step is captured: 64, 96, 128, 192, …"""
    return common_size(max(needed, FEWEST_COLUMNS), 2)


def buffer_rows(needed: int) -> int:
    """Return for how many sequences buffers are allocated if a batch has `needed`: a multiple of `FEWEST_ROWS`."""
    return -(-needed // FEWEST_ROWS) * FEWEST_ROWS


class UpdateSizes(NamedTuple):
    """The sizes to which a captured micro-batch of the update is padded."""

    rows: int  # prompts with their responses
    responses: int  # response tokens
    states: int  # hidden states that values are computed from: one more than response tokens in each row
    tokens: int  # packed tokens
    longest: int  # tokens of the longest sequence
    sequences: int  # packed sequences, those of the padding included
    spare_responses: int  # most response tokens of the padding


def update_sizes(rows: int, responses: int, tokens: int, longest: int) -> UpdateSizes:
    """Return the sizes of the micro-batches that share a CUDA graph with one of these sizes."""
    all_rows, all_responses = common_size(rows, 2), common_size(responses, 4, LEAST_FILL)
    all_states = all_responses + all_rows
    all_tokens = common_size(max(tokens, all_states), 8, LEAST_FILL)
    all_longest = common_size(longest, 4, LEAST_WIDTH)
    # How much padding a batch of these sizes needs at most; each row has one more state than response tokens
    spare_responses = size_step(all_responses, 4, LEAST_FILL) + all_rows
    spare_tokens = size_step(all_tokens, 8, LEAST_FILL) + spare_responses
    sequences = all_rows - (-spare_tokens // all_longest)
    return UpdateSizes(all_rows, all_responses, all_states, all_tokens, all_longest, sequences, spare_responses)
