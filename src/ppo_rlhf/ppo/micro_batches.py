"""Splits a batch into epochs, minibatches and micro-batches, and computes how many tokens fit into a micro-batch.

A batch is split once per iteration, before the batch's first forward pass: old log-probabilities and values are
computed on the first epoch's micro-batches. The first epoch's training repeats the same forward passes, so the
probability ratios of the first optimiser step are exactly 1; forward passes of other shapes would round differently.

On an accelerator, unless `ppo.max_tokens_per_micro_batch` is set, a micro-batch has as many tokens as fit into the free
memory. The plan of `kedro doctor` calls `update_bytes`, too, and the functions that compute its arguments
(docs/memory.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import minibatch_partition
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.passes.forward import backbone_of
from ppo_rlhf.passes.free_memory import USED, activation_bytes, free_bytes
from ppo_rlhf.passes.response_logprobs import logits_held
from ppo_rlhf.passes.sequences import SequenceBatch
from ppo_rlhf.passes.sharding import local_shard
from ppo_rlhf.ppo.optimisers import moment_bytes
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.processes import dealt_rows, from_all, is_main_process, own_rank, process_count, shards_models

log = logging.getLogger(__name__)

UNLIMITED_ON = ("cpu",)
"""Device types without a default token budget: a CPU computes small micro-batches as fast as large micro-batches."""
FEWEST_TOKENS = 2
"""The lowest value of `ppo.max_tokens_per_micro_batch`."""
EPOCH_BYTES, EPOCH_RESPONSE_BYTES = 64, 61
"""Bytes per token, and further bytes per response token, of the tensors that an update reads: token ids, positions,
indices and the inputs of the losses. The tensors of all micro-batches of an epoch are on the device together
(`ppo.update`)."""


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


Epochs = list[list[Minibatch]]
"""The minibatches of each epoch."""


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
    prompt_lengths: Sequence[int],
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
        prompt_lengths: Prompt tokens of every row of the batch.
        response_lengths: Response tokens of every row of the batch.
        most_tokens: The token budget of a micro-batch (`token_budget`); None sets no limit.
        padded: Whether the policy or the critic computes padding; if True, padding counts towards `most_tokens`.
        halvings: How many times each micro-batch is cut into two, because memory has run out.
    """

    def cut(rows: list[int], epoch: int) -> Minibatch:
        dealt = dealt_rows([prompt_lengths[row] + response_lengths[row] for row in rows])
        shards = [[rows[index] for index in shard] for shard in dealt]
        limits = config.local_micro_batch_size, prompt_lengths, response_lengths, most_tokens
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
    prompt_lengths: Sequence[int] = (),
    response_lengths: Sequence[int] = (),
    token_budget: int | None = None,
    *,
    padded: bool = True,
) -> list[list[int]]:
    """Cut one minibatch into micro-batches.

    Without a token budget the rows keep the minibatch's order. With a token budget the rows are sorted by length,
    longest first, so that the first micro-batch already shows whether memory suffices.

    Args:
        minibatch: Row indices into the batch.
        micro_batch_size: Maximum number of rows in a micro-batch.
        prompt_lengths: Prompt tokens of every row of the batch; read only with a token budget.
        response_lengths: Response tokens of every row of the batch; read only with a token budget.
        token_budget: Maximum number of tokens in a micro-batch; a row longer than the budget gets a micro-batch of its
            own. None: no limit.
        padded: Whether padding counts as tokens: True counts a micro-batch as its number of rows times the tokens of
            its longest row, False counts real tokens only.
    """
    if token_budget is None:
        return [minibatch[start : start + micro_batch_size] for start in range(0, len(minibatch), micro_batch_size)]

    def tokens(rows: list[int]) -> int:
        lengths = [prompt_lengths[row] + response_lengths[row] for row in rows]
        return len(rows) * max(lengths) if padded else sum(lengths)

    cut: list[list[int]] = []
    for row in sorted(minibatch, key=lambda row: -prompt_lengths[row] - response_lengths[row]):
        if not cut or len(cut[-1]) == micro_batch_size or tokens([*cut[-1], row]) > token_budget:
            cut.append([])
        cut[-1].append(row)
    return cut


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


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes that one process's update takes, without the models' weights and AdamW's moments."""

    gradients: int  # bytes of the gradients of all trained weights
    fixed: int  # bytes of one epoch's micro-batches, and of autocast's copies of the weights
    token: int  # bytes of activations that one token of a micro-batch keeps for the backward pass
    logit: int  # bytes of one logit and of the tensors computed from the logit
    held: int  # number of logits that are in memory at the same time

    def needed(self, tokens: int, logits: int) -> int:
        """Return the bytes of an update whose micro-batches have `tokens` tokens and `logits` logits."""
        return self.gradients + self.fixed + tokens * self.token + min(logits, self.held) * self.logit

    def tokens_in(self, free: int) -> int:
        """Return the most tokens of a micro-batch that fit into `free` bytes."""
        return max(FEWEST_TOKENS, int(USED * (free - self.needed(0, self.held))) // self.token)


def update_bytes(
    config: PPOConfig, policy: PretrainedConfig, *, tokens: int, gradients: int, copied: int, kept: int, held: int
) -> UpdateBytes:
    """Return the bytes that an update of a policy takes.

    Args:
        config: Hyperparameters, with the precision that `ppo.dtype=auto` stands for.
        policy: The configuration of the policy's model.
        tokens: Tokens of the longest prompt with its response.
        gradients: Bytes of all gradients (`gradient_bytes`).
        copied: Bytes of autocast's copies of the policy's weights (`copied_bytes`).
        kept: Bytes of the activations of one token in all layers (`kept_activations`).
        held: The most logits that are in memory at the same time.
    """
    text, itemsize = policy.get_text_config(), frozen_dtype(config).itemsize
    if config.gradient_checkpointing:
        kept = text.num_hidden_layers * text.hidden_size * itemsize + kept // text.num_hidden_layers
    epoch = config.local_batch_size * (tokens * EPOCH_BYTES + config.response_length * EPOCH_RESPONSE_BYTES)
    copies = 2
    if config.entropy_coef:
        copies += 1
    if config.kl_estimator == "full" and config.kl_in == "loss":
        copies += 2
    return UpdateBytes(gradients, epoch + copied, kept, itemsize * copies, held)


def gradient_bytes(trained: int, *, exchanged: bool, accumulated: bool) -> int:
    """Return the bytes of the gradients of `trained` bytes of weights.

    Gradients that processes exchange are views of DDP's buckets, but with several micro-batches in a minibatch
    gradients and buckets are separate tensors.
    """
    return trained * (2 if exchanged and accumulated else 1)


def kept_activations(policy: PreTrainedModel, critic: Critic | SharedCritic, number: int) -> int:
    """Return the bytes of activations that an update keeps for one token, of the policy's or the critic's backbone.

    `number` is the bytes of one number.
    """
    return max(activation_bytes(backbone, number) for backbone in (backbone_of(policy), critic.backbone))


def copied_bytes(config: PPOConfig, policy: PreTrainedModel) -> int:
    """Return the bytes of copies of a policy's weights in the dtype of the forward pass.

    autocast casts all weights to a 16-bit dtype; with `load_in_4bit` one layer at a time is unpacked from 4 bits.
    """
    itemsize = frozen_dtype(config).itemsize
    # Count a linear layer's inputs x outputs, because 4-bit weights are packed into another shape
    if config.load_in_4bit:
        backbone = backbone_of(policy)
        sizes = [m.in_features * m.out_features for m in backbone.modules() if isinstance(m, nn.Linear)]
        sizes += [m.weight.numel() for m in backbone.modules() if isinstance(m, Conv1D)]
        return max(sizes) * itemsize
    # With LoRA the frozen weights are 16-bit already, so autocast makes no copies
    is_cast = itemsize == 2 and not config.use_peft
    return 2 * sum(local_shard(p).numel() for p in policy.parameters()) if is_cast else 0


def follows_memory(config: PPOConfig, device: torch.device) -> bool:
    """Return whether the token budget of a micro-batch is computed from the free memory."""
    return config.max_tokens_per_micro_batch is None and device.type not in UNLIMITED_ON and not config.deterministic


def token_budget(state: TrainingState, prompt_length: int) -> int | None:
    """Return the most tokens of a micro-batch of this run, or None for no limit.

    `prompt_length` is the number of tokens of the longest prompt. If the token budget follows the free memory, the
    first call computes the minimum over all processes, stores the minimum in the state and logs it. All processes must
    call `token_budget`, and the models must already be on their devices.
    """
    config, device = state.config, state.device
    if state.micro_batch_tokens is None and follows_memory(config, device):
        free = free_bytes(device)
        update = _update_bytes(state, prompt_length + config.response_length)
        state.micro_batch_tokens = min(from_all(update.tokens_in(free - _missing_moments(state.optimizers, config))))
        if is_main_process():
            log.info(
                "A micro-batch has at most %d responses and at most %d tokens, prompts included, since %.1f GiB are "
                "free on %s (ppo.max_tokens_per_micro_batch=null)",
                config.local_micro_batch_size,
                state.micro_batch_tokens,
                free / 2**30,
                device,
            )
    return config.max_tokens_per_micro_batch or state.micro_batch_tokens


def _update_bytes(state: TrainingState, tokens: int) -> UpdateBytes:
    config, trained = state.config, sum(p.nbytes for p in _trained(state.optimizers))
    exchanged = process_count() > 1 and not shards_models()
    return update_bytes(
        config,
        state.policy.config,
        tokens=tokens,
        # The budget that follows may cut a minibatch into several micro-batches
        gradients=gradient_bytes(trained, exchanged=exchanged, accumulated=True),
        copied=copied_bytes(config, state.policy),
        kept=kept_activations(state.policy, state.critic, frozen_dtype(config).itemsize),
        held=logits_held(state.device),
    )


def _missing_moments(optimizers: list[Optimizer], config: PPOConfig) -> int:
    """Return the bytes of AdamW's moments that the first optimiser step will allocate; 0 if the moments exist."""
    if any(optimizer.state for optimizer in optimizers):
        return 0
    return sum(moment_bytes(parameter, config) for parameter in _trained(optimizers))


def _trained(optimizers: list[Optimizer]) -> list[Tensor]:
    """Return this process's shard of each parameter that trains."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [local_shard(parameter) for group in groups for parameter in group["params"]]
