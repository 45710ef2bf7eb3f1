"""The cut of a batch into epochs, minibatches and micro-batches, and how many tokens of a micro-batch a device holds.

The cut is made once, before the first forward pass: old log-probabilities and values are computed on the first epoch's
micro-batches. The first epoch then repeats the very same forward passes, so its first ratio is exactly 1: a matrix
product of another shape rounds differently.

If no setting says how many tokens a micro-batch has on an accelerator, it is as many as the free memory holds. The
bytes of an update are those of `kedro doctor` (docs/memory.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.randomness import minibatch_partition
from ppo_rlhf.models.forward import backbone_of
from ppo_rlhf.models.free_memory import USED, activation_bytes, free_bytes
from ppo_rlhf.models.sharding import local_shard
from ppo_rlhf.ppo.forward_passes import logits_held
from ppo_rlhf.ppo.optimisers import moment_bytes
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.processes import dealt_rows, from_all, is_main_process, own_rank, process_count, shards_models

log = logging.getLogger(__name__)

UNLIMITED_ON = ("cpu",)
"""Types of devices on which only the number of responses limits a micro-batch: smaller ones are as fast there."""
FEWEST_TOKENS = 2
"""The least that `ppo.max_tokens_per_micro_batch` may be."""
EPOCH_BYTES, EPOCH_RESPONSE_BYTES = 64, 61
"""Of each token, and of each response token on top: ids, positions and indices, and the numbers that the losses read,
of all micro-batches of an epoch, which are on the device together (`ppo.update`)."""


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimiser step, as indices into the batch of all processes."""

    rows: list[int]  # of all processes
    micro_batches: list[list[int]]  # of this process: the rows of each forward and backward pass
    shards: list[list[int]]  # the rows of each process
    with_policy: bool = True  # False in the epochs that only the critic has


Epochs = list[list[Minibatch]]
"""The minibatches of each epoch."""


def first_epoch(epochs: Epochs) -> list[list[int]]:
    """Return the micro-batches of the first epoch that this process computes."""
    return [rows for minibatch in epochs[0] for rows in minibatch.micro_batches]


def first_shards(epochs: Epochs) -> list[list[int]]:
    """Return the rows of the first epoch that each process computes."""
    by_process = zip(*(minibatch.shards for minibatch in epochs[0]), strict=True)
    return [[row for shard in of_one for row in shard] for of_one in by_process]


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
    All shards are cut into equally many micro-batches, since in some passes all processes take part (FSDP2).
    `most_tokens` is the budget of a micro-batch (`token_budget`), None for no limit; `padded` says whether policy or
    critic compute padding, which then counts in it.
    """

    def cut(rows: list[int], epoch: int) -> Minibatch:
        dealt = dealt_rows([prompt_lengths[row] + response_lengths[row] for row in rows])
        shards = [[rows[place] for place in shard] for shard in dealt]
        budget = config.local_micro_batch_size, prompt_lengths, response_lengths, most_tokens
        cuts = [micro_batches(shard, *budget, padded=padded) for shard in shards]
        own = _in_pieces(cuts[own_rank()], max(map(len, cuts)))
        return Minibatch(rows, own, shards, epoch < config.num_ppo_epochs)

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
        token_budget: Maximum number of tokens in a micro-batch; a longer row gets a micro-batch of its own. None: no
            limit.
        padded: True counts padding: a micro-batch has rows × longest row tokens. False counts real tokens only.
    """
    if token_budget is None:
        return [minibatch[start : start + micro_batch_size] for start in range(0, len(minibatch), micro_batch_size)]

    def tokens(rows: list[int]) -> int:
        lengths = [prompt_lengths[row] + response_lengths[row] for row in rows]
        return len(rows) * max(lengths) if padded else sum(lengths)

    pieces: list[list[int]] = []
    for row in sorted(minibatch, key=lambda row: -prompt_lengths[row] - response_lengths[row]):
        if not pieces or len(pieces[-1]) == micro_batch_size or tokens([*pieces[-1], row]) > token_budget:
            pieces.append([])
        pieces[-1].append(row)
    return pieces


def _in_pieces(cut: list[list[int]], count: int) -> list[list[int]]:
    """Halve the micro-batch with the most rows until there are so many; the shard has as many rows at least."""
    cut = list(cut)
    while len(cut) < count:
        longest = max(range(len(cut)), key=lambda number: len(cut[number]))
        rows = cut[longest]
        cut[longest : longest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return cut


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes of one process's update, beside weights and moments."""

    gradients: int
    fixed: int  # an epoch's tensors, copies of weights in the type of the computation
    token: int  # activations of one token of a micro-batch
    logit: int  # one logit, and what is computed from it
    held: int  # a number of logits: those that are there at a time

    def needed(self, tokens: int, logits: int) -> int:
        """Return the bytes of an update in micro-batches of so many tokens with so many logits."""
        return self.gradients + self.fixed + self.passing(tokens, logits)

    def passing(self, tokens: int, logits: int) -> int:
        """Return the bytes that a micro-batch makes and drops."""
        return tokens * self.token + min(logits, self.held) * self.logit

    def tokens_in(self, free: int) -> int:
        """Return the most tokens of a micro-batch for which so many free bytes suffice."""
        return max(FEWEST_TOKENS, int(USED * (free - self.needed(0, self.held))) // self.token)


def update_bytes(
    config: PPOConfig,
    policy: PretrainedConfig,
    *,
    tokens: int,
    gradients: int,
    copied: int,
    activations: int,
    held: int,
) -> UpdateBytes:
    """Return what an update of a policy takes.

    Args:
        config: With the precision that `ppo.dtype=auto` stands for.
        policy: The configuration of its model.
        tokens: Of the longest prompt with its response.
        gradients: Bytes of all gradients.
        copied: Bytes of copies of weights in the type of the computation.
        activations: Bytes of one token in all layers.
        held: Logits that are there at a time.
    """
    text, number = policy.get_text_config(), frozen_dtype(config).itemsize
    if config.gradient_checkpointing:
        activations = text.num_hidden_layers * text.hidden_size * number + activations // text.num_hidden_layers
    epoch = config.local_batch_size * (tokens * EPOCH_BYTES + config.response_length * EPOCH_RESPONSE_BYTES)
    copies = 2
    if config.entropy_coef:
        copies += 1
    if config.kl_estimator == "full" and config.kl_in == "loss":
        copies += 2
    return UpdateBytes(gradients, epoch + copied, activations, number * copies, held)


def copied_bytes(config: PPOConfig, policy: nn.Module, backbone: nn.Module) -> int:
    """Return the bytes of weights of a policy in the type of the computation: autocast's, or one layer unpacked."""
    number = frozen_dtype(config).itemsize
    if config.load_in_4bit:  # 4-bit weights have another shape
        sizes = [m.in_features * m.out_features for m in backbone.modules() if isinstance(m, nn.Linear)]
        sizes += [m.weight.numel() for m in backbone.modules() if isinstance(m, Conv1D)]
        return max(sizes) * number
    is_cast = number == 2 and not config.use_peft  # under LoRA the weights have 16 bits
    return 2 * sum(local_shard(p).numel() for p in policy.parameters()) if is_cast else 0


def follows_memory(config: PPOConfig, device: torch.device) -> bool:
    """Return whether the free memory says how many tokens a micro-batch has."""
    return config.max_tokens_per_micro_batch is None and device.type not in UNLIMITED_ON and not config.deterministic


def token_budget(state: TrainingState, prompt_length: int) -> int | None:
    """Return the most tokens of a micro-batch of this run, whose longest prompt has so many; None sets no limit.

    If the free memory says it, the first call settles the number, as the least of all processes, and logs it. All
    processes call it when the run's models are in their places.
    """
    config, device = state.config, state.device
    if state.micro_batch_tokens is None and follows_memory(config, device):
        free = free_bytes(device)
        own = _update_bytes(state, prompt_length + config.response_length).tokens_in(free - _missing_moments(state))
        state.micro_batch_tokens = min(from_all(own))
        if is_main_process():
            log.info(
                "Micro-batches of at most %d responses have at most %d tokens with their prompts, since %.1f GiB are "
                "free on %s (ppo.max_tokens_per_micro_batch=null)",
                config.local_micro_batch_size,
                state.micro_batch_tokens,
                free / 2**30,
                device,
            )
    return config.max_tokens_per_micro_batch or state.micro_batch_tokens


def _update_bytes(state: TrainingState, tokens: int) -> UpdateBytes:
    config, number = state.config, frozen_dtype(state.config).itemsize
    backbones = backbone_of(state.policy), state.critic.backbone
    has_buckets = process_count() > 1 and not shards_models()  # DDP's, beside which gradients accumulate
    return update_bytes(
        config,
        state.policy.config,
        tokens=tokens,
        gradients=sum(p.nbytes for p in _trained(state)) * (2 if has_buckets else 1),
        copied=copied_bytes(config, state.policy, backbones[0]),
        activations=max(activation_bytes(backbone, number) for backbone in backbones),
        held=logits_held(state.device),
    )


def _missing_moments(state: TrainingState) -> int:
    """Return the bytes of the moments that the first optimiser step will make."""
    if any(optimizer.state for optimizer in state.optimizers):
        return 0
    return sum(moment_bytes(parameter, state.config) for parameter in _trained(state))


def _trained(state: TrainingState) -> list[Tensor]:
    """Return this process's part of each parameter that trains."""
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    return [local_shard(parameter) for group in groups for parameter in group["params"]]
