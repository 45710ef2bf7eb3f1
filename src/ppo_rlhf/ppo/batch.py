"""A batch: its cut into minibatches, and prompts and responses as the tensors that a model takes.

Masks come from lengths, never from token ids. The cut into epochs, minibatches and micro-batches is made once, before
the first forward pass: old log-probabilities and values are computed on the first epoch's micro-batches. The first
epoch then repeats the very same forward passes, so its first ratio is exactly 1: a matrix product of another shape
rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import micro_batches, minibatch_partition
from ppo_rlhf.models.packed_attention import place_rows
from ppo_rlhf.models.token_rows import TokenRows, filled_size, joined_rows, token_parts
from ppo_rlhf.processes import dealt_rows, own_rank


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


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimiser step, as indices into the batch of all processes."""

    rows: list[int]  # of all processes
    micro_batches: list[list[int]]  # of this process: the rows of each forward and backward pass
    hands: list[list[int]]  # the rows of each process
    with_policy: bool = True  # False in the epochs that only the critic has


Epochs = list[list[Minibatch]]
"""The minibatches of each epoch."""


def first_epoch(epochs: Epochs) -> list[list[int]]:
    """Return the micro-batches of the first epoch that this process computes."""
    return [rows for minibatch in epochs[0] for rows in minibatch.micro_batches]


def first_hands(epochs: Epochs) -> list[list[int]]:
    """Return the rows of the first epoch that each process computes."""
    by_process = zip(*(minibatch.hands for minibatch in epochs[0]), strict=True)
    return [[row for hand in of_one for row in hand] for of_one in by_process]


def cut_batch(
    config: PPOConfig,
    iteration: int,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    most_tokens: int | None,
    *,
    padded: bool,
) -> Epochs:
    """Return the minibatches of every epoch of an iteration's update.

    The minibatches depend only on the seed; each process gets as many rows of every one, and of about as many tokens.
    All hands are cut into equally many micro-batches, since in some passes all processes take part (FSDP2).
    `most_tokens` is the budget of a micro-batch (`token_budget`), None for no limit; `padded` says whether policy or
    critic compute padding, which then counts in it.
    """

    def cut(rows: list[int], epoch: int) -> Minibatch:
        dealt = dealt_rows([prompt_lengths[row] + response_lengths[row] for row in rows])
        hands = [[rows[place] for place in hand] for hand in dealt]
        budget = config.local_micro_batch_size, prompt_lengths, response_lengths, most_tokens
        cuts = [micro_batches(hand, *budget, padded=padded) for hand in hands]
        own = _in_pieces(cuts[own_rank()], max(map(len, cuts)))
        return Minibatch(rows, own, hands, epoch < config.num_ppo_epochs)

    sizes = config.batch_size, config.num_mini_batches
    epochs = range(config.num_critic_epochs or config.num_ppo_epochs)
    parts = [minibatch_partition(config.seed, iteration, epoch, *sizes) for epoch in epochs]
    return [[cut(rows, epoch) for rows in part] for epoch, part in enumerate(parts)]


def _in_pieces(cut: list[list[int]], count: int) -> list[list[int]]:
    """Halve the micro-batch with the most rows until there are so many; the hand has as many rows at least."""
    cut = list(cut)
    while len(cut) < count:
        longest = max(range(len(cut)), key=lambda number: len(cut[number]))
        rows = cut[longest]
        cut[longest : longest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return cut
