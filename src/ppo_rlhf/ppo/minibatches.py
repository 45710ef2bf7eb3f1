"""The cut of an iteration's batch into epochs, minibatches and micro-batches, made once, before the first forward pass.

Old log-probabilities and values are computed on the first epoch's micro-batches. The first epoch then repeats the very
same forward passes, so its first ratio is exactly 1: a matrix product of another shape rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import micro_batches, minibatch_partition
from ppo_rlhf.processes import own_share


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimiser step, as indices into the batch of all processes."""

    rows: list[int]  # of all processes
    micro_batches: list[list[int]]  # of this process: the rows of each forward and backward pass


Epochs = list[list[Minibatch]]
"""The minibatches of each epoch."""


def first_epoch(epochs: Epochs) -> list[list[int]]:
    """Return the micro-batches of the first epoch that this process computes."""
    return [rows for minibatch in epochs[0] for rows in minibatch.micro_batches]


def cut_batch(
    config: PPOConfig,
    iteration: int,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    padded: bool,
) -> Epochs:
    """Return the minibatches of every epoch of an iteration's update.

    The minibatches depend on the seed alone; each process gets an equal share of every one.

    Args:
        config: Sizes, token budget and seed.
        iteration: From 1.
        prompt_lengths: Tokens of each row's prompt.
        response_lengths: Tokens of each row's response.
        padded: Whether policy or critic compute padding, which then counts in the token budget.
    """

    def cut(rows: list[int]) -> Minibatch:
        share = own_share(len(rows))
        own = micro_batches(
            rows[share.start : share.stop],
            config.local_micro_batch_size,
            prompt_lengths,
            response_lengths,
            config.max_tokens_per_micro_batch,
            padded=padded,
        )
        return Minibatch(rows, own)

    sizes = config.batch_size, config.num_mini_batches
    epochs = range(config.num_ppo_epochs)
    return [[cut(rows) for rows in minibatch_partition(config.seed, iteration, epoch, *sizes)] for epoch in epochs]
