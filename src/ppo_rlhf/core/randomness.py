"""Randomness as a pure function of (seed, stream, index), never of process state, so that resuming needs no replay.

Streams keep uses apart: the uniforms of `rollout` 3 have nothing to do with the permutation of `minibatches` 3.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, stream: str, *index: int) -> torch.Generator:
    """Return a CPU generator that depends on nothing but its arguments."""
    digest = hashlib.sha256("/".join([str(seed), stream, *map(str, index)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def permutation(size: int, seed: int, stream: str, *index: int) -> Tensor:
    """Return a permutation of `range(size)`, `[size]` long."""
    return torch.randperm(size, generator=generator(seed, stream, *index))


def episode_uniforms(seed: int, stream: str, index: int, rows: int, steps: int) -> Tensor:
    """Return one uniform in [0, 1) per (episode, step), `[rows, steps]` float64.

    They are drawn for the whole batch at once, so that cutting the batch does not change an episode's noise.
    """
    return torch.rand(rows, steps, generator=generator(seed, stream, index), dtype=torch.float64)


def episode_prompts(seed: int, iteration: int, batch_size: int, num_prompts: int) -> list[int]:
    """Return the prompt indices of the `batch_size` episodes of an iteration, counted from 1.

    Episodes run through one seeded permutation of the prompts per pass, without a break between passes, so each
    prompt is used equally often.
    """
    places = [divmod(episode, num_prompts) for episode in range((iteration - 1) * batch_size, iteration * batch_size)]
    numbers = {number for number, _ in places}
    passes = {number: permutation(num_prompts, seed, "prompts", number).tolist() for number in numbers}
    return [passes[number][position] for number, position in places]


def minibatch_partition(seed: int, iteration: int, epoch: int, size: int, num_mini_batches: int) -> list[list[int]]:
    """Return the shuffled minibatches of one epoch as lists of row indices, `size / num_mini_batches` rows each."""
    rows = permutation(size, seed, "minibatches", iteration, epoch).tolist()
    length = size // num_mini_batches
    return [rows[start : start + length] for start in range(0, size, length)]
