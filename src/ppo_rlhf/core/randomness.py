"""Computes random numbers from (seed, stream, index) only, never from process state, so that resuming needs no replay.

A stream is the name of one use of random numbers. Streams are independent of each other: the uniforms of index 3 of the
stream `rollout` and the permutation of index 3 of the stream `minibatches` have nothing in common.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, stream: str, *index: int) -> torch.Generator:
    """Return a CPU random number generator whose state depends only on the seed, the stream and the index."""
    digest = hashlib.sha256("/".join([str(seed), stream, *map(str, index)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def permutation(size: int, seed: int, stream: str, *index: int) -> Tensor:
    """Return a random permutation of `range(size)`, [size] int64."""
    return torch.randperm(size, generator=generator(seed, stream, *index))


def episode_uniforms(seed: int, stream: str, index: int, rows: int, steps: int) -> Tensor:
    """Return one uniform in [0, 1) per (episode, step), `[rows, steps]` float64.

    The uniforms are drawn for the whole batch at once, so that an episode's noise does not depend on how the batch is
    split.
    """
    return torch.rand(rows, steps, generator=generator(seed, stream, index), dtype=torch.float64)


def episode_prompts(seed: int, iteration: int, batch_size: int, num_prompts: int) -> list[int]:
    """Return the prompt index of each of the `batch_size` episodes of an iteration; iterations count from 1.

    Each pass over the prompts follows its own seeded permutation, and the next pass starts directly after the last
    prompt, so that all prompts are used equally often.
    """
    episodes = range((iteration - 1) * batch_size, iteration * batch_size)
    # (number of the pass over the prompts, position in that pass's permutation)
    positions = [divmod(episode, num_prompts) for episode in episodes]
    numbers = {number for number, _ in positions}
    passes = {number: permutation(num_prompts, seed, "prompts", number).tolist() for number in numbers}
    return [passes[number][position] for number, position in positions]


def minibatch_partition(seed: int, iteration: int, epoch: int, size: int, num_mini_batches: int) -> list[list[int]]:
    """Return the shuffled minibatches of one epoch as lists of row indices, `size / num_mini_batches` rows each."""
    rows = permutation(size, seed, "minibatches", iteration, epoch).tolist()
    length = size // num_mini_batches
    return [rows[start : start + length] for start in range(0, size, length)]
