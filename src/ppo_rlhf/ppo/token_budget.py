"""Computes how many tokens fit into a micro-batch of an update.

On an accelerator, unless `ppo.max_tokens_per_micro_batch` is set, a micro-batch has as many tokens as fit into the free
memory. The plan of `kedro doctor` calls `update_bytes`, too, and the functions that compute its arguments
(docs/memory.md).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.passes.forward import backbone_of
from ppo_rlhf.passes.free_memory import USED, activation_bytes, free_bytes
from ppo_rlhf.passes.response_logprobs import logits_held
from ppo_rlhf.passes.sharding import local_shard
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.optimisers import moment_bytes
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.runtime.processes import from_all, is_main_process, process_count, shards_models

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


def token_budget(learner: Learner, prompt_length: int) -> int | None:
    """Return the most tokens of a micro-batch of this run, or None for no limit.

    `prompt_length` is the number of tokens of the longest prompt. If the token budget follows the free memory, the
    first call computes the minimum over all processes, stores it in the learner and logs it. All processes must
    call `token_budget`, and the models must already be on their devices.
    """
    config, device = learner.config, learner.device
    if learner.micro_batch_tokens is None and follows_memory(config, device):
        free = free_bytes(device)
        update = _update_bytes(learner, prompt_length + config.response_length)
        learner.micro_batch_tokens = min(
            from_all(update.tokens_in(free - _missing_moments(learner.optimizers, config)))
        )
        if is_main_process():
            log.info(
                "A micro-batch has at most %d responses and at most %d tokens, prompts included, since %.1f GiB are "
                "free on %s (ppo.max_tokens_per_micro_batch=null)",
                config.local_micro_batch_size,
                learner.micro_batch_tokens,
                free / 2**30,
                device,
            )
    return config.max_tokens_per_micro_batch or learner.micro_batch_tokens


def _update_bytes(learner: Learner, tokens: int) -> UpdateBytes:
    config, trained = learner.config, sum(p.nbytes for p in _trained(learner.optimizers))
    exchanged = process_count() > 1 and not shards_models()
    return update_bytes(
        config,
        learner.policy.config,
        tokens=tokens,
        # The budget that follows may cut a minibatch into several micro-batches
        gradients=gradient_bytes(trained, exchanged=exchanged, accumulated=True),
        copied=copied_bytes(config, learner.policy),
        kept=kept_activations(learner.policy, learner.critic, frozen_dtype(config).itemsize),
        held=logits_held(learner.device),
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
