"""Cuts a batch into epochs, minibatches and micro-batches.

A batch is cut once per iteration, before the batch's first forward pass: old log-probabilities and values are computed
on the first epoch's micro-batches. The first epoch's training repeats the same forward passes, so the probability
ratios of the first optimiser step are exactly 1; forward passes of other shapes would round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import minibatch_partition
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.passes.prefixes import AlikeRows, tokens_in_memory
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.passes.sequences import SequenceBatch, sequence_batches
from ppo_rlhf.runtime.processes import dealt_rows, own_rank


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimiser step, as indices into the batch of all processes."""

    rows: list[int]  # indices of the minibatch's rows, of all processes
    micro_batches: list[list[int]]  # indices of the rows of each of this process's micro-batches
    shards: list[list[int]]  # for each process, the indices of the minibatch's rows that the process trains on
    with_policy: bool = True  # False in epochs that train only the critic, not the policy

    @property
    def most_rows(self) -> int:
        """The rows of the largest of this process's micro-batches."""
        return max(map(len, self.micro_batches), default=0)


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward and backward pass: b rows with t response columns."""

    batch: SequenceBatch
    tokens: int  # number of the micro-batch's tokens that the losses count
    mask: Tensor  # [b, t] bool, True on the tokens that the losses count
    # [b, t], log-probabilities before the update; with `importance_low`, the sampler's log-probabilities
    old_logprobs: Tensor
    reference_logprobs: Tensor  # [b, t], log-probabilities of the reference policy
    advantages: Tensor  # [b, t], advantages multiplied by the importance weights
    values: Tensor  # [b, t], the critic's values before the update
    returns: Tensor  # [b, t], returns that the critic learns
    # [b, t] bool, True on the tokens of positive examples; None if the loss has no term for positive examples
    positive: Tensor | None = None


@dataclass(frozen=True)
class StepInputs:
    """What one optimiser step learns from: a minibatch, and this process's micro-batches of it."""

    micro_batches: list[MicroBatch]  # those of this process, on the device
    most_rows: int  # the rows of the largest of them
    tokens: int  # number of the whole minibatch's tokens that the losses count
    denominator: float  # divisor of the summed losses of policy and critic: the count of the whole minibatch
    positives: float  # divisor of the summed loss of positive examples
    with_policy: bool  # False in epochs that train only the critic, so that the policy has no forward pass
    learns: bool  # False while only the critic warms up, so that the policy has no gradients


Epochs = list[list[Minibatch]]
"""The minibatches of each epoch."""


@dataclass(frozen=True)
class BatchCut:
    """A batch of responses, cut into the minibatches and micro-batches of an update. Rollouts and update share it."""

    config: PPOConfig
    iteration: int  # number of the iteration, counted from 1
    prompts: PromptDataset  # one for each response
    responses: Responses  # the responses that are cut
    most_tokens: int | None  # token budget of a micro-batch; None: no limit
    padded: bool  # whether policy or critic compute padding, which then counts towards `most_tokens`
    fill: bool  # whether packed token rows are padded to a few common sizes (`precision.fills_rows`)
    pad_token_id: int  # used for padding; no result depends on it
    halvings: int = 0  # how many times each micro-batch is cut into two, because memory has run out

    @cached_property
    def epochs(self) -> Epochs:
        """The minibatches of each epoch."""
        rows = self.prompts.prompt_ids, self.responses.lengths.tolist()
        return cut_batch(
            self.config, self.iteration, *rows, self.most_tokens, padded=self.padded, halvings=self.halvings
        )

    @cached_property
    def first_inputs(self) -> list[SequenceBatch]:
        """The inputs of this process's micro-batches of the first epoch, on the CPU.

        Before the update they give log-probabilities and values, and the update repeats the same passes.
        """
        return self.inputs(self.first_micro_batches)

    @property
    def first_micro_batches(self) -> list[list[int]]:
        """The rows of each of this process's micro-batches of the first epoch."""
        return own_micro_batches(self.epochs[0])

    @property
    def most_rows(self) -> int:
        """The rows of the largest of this process's micro-batches of the first epoch."""
        return max(minibatch.most_rows for minibatch in self.epochs[0])

    def inputs(self, groups: list[list[int]]) -> list[SequenceBatch]:
        """Make the inputs of policy and critic of micro-batches, each a list of rows."""
        rows = self.prompts.prompt_ids, self.responses.response_ids, self.responses.lengths
        return sequence_batches(*rows, groups, self.pad_token_id, fill=self.fill)


def own_micro_batches(epoch: list[Minibatch]) -> list[list[int]]:
    """Return the rows of each micro-batch of an epoch that this process computes."""
    return [rows for minibatch in epoch for rows in minibatch.micro_batches]


def first_shards(epochs: Epochs) -> list[list[int]]:
    """Return each process's rows of the first epoch."""
    by_process = zip(*(minibatch.shards for minibatch in epochs[0]), strict=True)
    return [[row for shard in shards for row in shard] for shards in by_process]


def cut_batch(
    config: PPOConfig,
    iteration: int,
    prompt_ids: Sequence[Sequence[int]],
    response_lengths: Sequence[int],
    most_tokens: int | None,
    *,
    padded: bool,
    halvings: int = 0,
) -> Epochs:
    """Return the minibatches of every epoch of an iteration's update.

    The minibatches depend only on the seed and the iteration. Each minibatch is split evenly across processes,
    balancing tokens. All processes get equally many micro-batches, since with FSDP2 all processes take part in each
    forward and backward pass.

    Args:
        config: Hyperparameters.
        iteration: The iteration, counted from 1.
        prompt_ids: The prompt of every row of the batch.
        response_lengths: Response tokens of every row of the batch.
        most_tokens: The token budget of a micro-batch (`token_budget`); None sets no limit.
        padded: Whether the policy or the critic computes padding; if True, padding counts towards `most_tokens`.
        halvings: How many times each micro-batch is cut into two, because memory has run out.
    """

    def cut(rows: list[int], epoch: int) -> Minibatch:
        dealt = dealt_rows([len(prompt_ids[row]) + response_lengths[row] for row in rows])
        shards = [[rows[index] for index in shard] for shard in dealt]
        limits = config.local_micro_batch_size, prompt_ids, response_lengths, most_tokens
        cuts = [_halved(micro_batches(shard, *limits, padded=padded), halvings) for shard in shards]
        rank_micro_batches = _split_to(cuts[own_rank()], max(map(len, cuts)))
        return Minibatch(rows, rank_micro_batches, shards, epoch < config.num_ppo_epochs)

    sizes = config.batch_size, config.num_mini_batches
    epochs = range(config.num_critic_epochs or config.num_ppo_epochs)
    parts = [minibatch_partition(config.seed, iteration, epoch, *sizes) for epoch in epochs]
    return [[cut(rows, epoch) for rows in part] for epoch, part in enumerate(parts)]


def micro_batches(
    minibatch: list[int],
    micro_batch_size: int,
    prompt_ids: Sequence[Sequence[int]] = (),
    response_lengths: Sequence[int] = (),
    token_budget: int | None = None,
    *,
    padded: bool = True,
) -> list[list[int]]:
    """Cut one minibatch into micro-batches.

    Rows whose prompts begin alike follow each other, so that they share a micro-batch, which computes the common
    beginning once. If no prompts begin alike, or with padding, the rows keep the minibatch's order, and with a token
    budget they are sorted by length. With a token budget the first micro-batch is the largest, or has the longest row,
    so that it already shows whether memory suffices.

    Args:
        minibatch: Row indices into the batch.
        micro_batch_size: Maximum number of rows in a micro-batch.
        prompt_ids: The prompt of every row of the batch; read only with a token budget or without padding.
        response_lengths: Response tokens of every row of the batch; read only with a token budget.
        token_budget: Maximum number of tokens in a micro-batch; a row longer than the budget gets a micro-batch of its
            own. None: no limit.
        padded: Whether padding counts as tokens: True counts a micro-batch as its number of rows times the tokens of
            its longest row, False counts the tokens that it computes, and repeated keys (`prefixes.tokens_in_memory`).
    """
    if token_budget is None and len(minibatch) <= micro_batch_size:
        return [minibatch] if minibatch else []

    def length(row: int) -> int:
        return len(prompt_ids[row]) + response_lengths[row]

    alike = AlikeRows(minibatch, []) if padded else AlikeRows.of(minibatch, prompt_ids)
    shares = alike.share
    if not shares:
        rows = minibatch if token_budget is None else sorted(minibatch, key=length, reverse=True)
        alike = AlikeRows(rows, [0] * (len(rows) - 1))

    def tokens(start: int, end: int) -> int:
        lengths, prefix = [length(row) for row in alike.rows[start:end]], alike.prefix(start, end)
        return len(lengths) * max(lengths) if padded else tokens_in_memory(sum(lengths), prefix.saved if prefix else 0)

    starts: list[int] = []
    for place in range(len(minibatch)):
        is_first = not starts or place - starts[-1] == micro_batch_size
        if is_first or (token_budget is not None and tokens(starts[-1], place + 1) > token_budget):
            starts.append(place)
    parts = list(pairwise([*starts, len(minibatch)]))
    if shares and token_budget is not None:
        parts.sort(key=lambda part: tokens(*part), reverse=True)
    return [alike.rows[start:end] for start, end in parts]


def _halved(cut: list[list[int]], times: int) -> list[list[int]]:
    """Cut each micro-batch of at least two rows into two, `times` times."""
    for _ in range(times):
        cut = [half for rows in cut for half in (rows[: -(-len(rows) // 2)], rows[-(-len(rows) // 2) :]) if half]
    return cut


def _split_to(cut: list[list[int]], count: int) -> list[list[int]]:
    """Halve the micro-batch with the most rows until there are `count` micro-batches; needs at least `count` rows."""
    cut = list(cut)
    while len(cut) < count:
        largest = max(range(len(cut)), key=lambda number: len(cut[number]))
        rows = cut[largest]
        cut[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return cut
