"""AdamW for policy and critic, and their learning rates over the iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn
from torch.optim import AdamW

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError

if TYPE_CHECKING:
    from ppo_rlhf.ppo.state import TrainingState


def check_trains(model: nn.Module, what: str) -> None:
    """Raise `ModelError` if all weights of a model are frozen: AdamW takes no empty list, and nothing would train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"no weight of the {what} trains: requires_grad is False of all of them. Set it where weights are to "
            "train (requires_grad_(True) on the model, for all), or train adapters (ppo.use_peft=true)"
        )


def build_optimizer(module: nn.Module, learning_rate: float, config: PPOConfig) -> AdamW:
    """Return AdamW over the parameters that train; with weight decay, matrices and vectors are two groups.

    Only matrices decay: biases and the weights of norms, which are vectors, are pulled towards 0 by nothing.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [{"params": trained, "weight_decay": 0.0}]
    if config.weight_decay:
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True if config.optim == "adamw_torch_fused" else None,
    )


def peak_learning_rates(config: PPOConfig) -> tuple[float, float]:
    """Return the policy's and the critic's peak learning rate."""
    return config.learning_rate, config.value_learning_rate or config.learning_rate


def learning_rate_factor(config: PPOConfig, iteration: int, peak: float | None = None) -> float:
    """Return the factor on a peak learning rate in an iteration, counted from 1.

    transformers' schedules start a warm-up at 0 and end a decay at 0; here iteration i of a warm-up over w has the
    factor i / w, and after it step `iteration - 1` of `num_total_batches` is taken: no rate is ever 0.

    Args:
        config: Names the schedule and the warm-up.
        iteration: From 1.
        peak: The peak learning rate; only the polynomial schedule, which ends at 1e-7, looks at it. None: the policy's.
    """
    warmup, total = config.warmup_iterations, config.num_total_batches
    step = iteration - 1
    if step < warmup:
        return iteration / warmup
    name = "constant_with_warmup" if config.lr_scheduler_type == "constant" else config.lr_scheduler_type
    placeholder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak or config.learning_rate)
    schedule = transformers.get_scheduler(name, placeholder, num_warmup_steps=warmup, num_training_steps=total)
    return float(schedule.lr_lambdas[0](step))


def set_learning_rates(state: TrainingState, iteration: int) -> tuple[float, float]:
    """Set both optimisers' rates for an iteration, counted from 1, and return (policy's, critic's)."""
    policy_rate, critic_rate = (
        peak * learning_rate_factor(state.config, iteration, peak) for peak in peak_learning_rates(state.config)
    )
    for optimizer, rate in ((state.policy_optimizer, policy_rate), (state.critic_optimizer, critic_rate)):
        for group in optimizer.param_groups:
            group["lr"] = rate
    return policy_rate, critic_rate
