"""Builds AdamW for policy and critic, saves and loads its moments, and computes learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, assert_never, cast

import torch
import transformers
from torch import Tensor, nn
from torch.optim import AdamW

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import EIGHT_BIT
from ppo_rlhf.core.errors import CheckpointError, ModelError
from ppo_rlhf.models.preparation import not_finite
from ppo_rlhf.passes.sharding import local_shard_of

FEWEST_IN_EIGHT_BITS, BLOCK = 4096, 256
"""bitsandbytes keeps the moments of parameters with fewer than `FEWEST_IN_EIGHT_BITS` numbers in 32 bits. In 8 bits
`BLOCK` numbers share one scale."""


def check_trains(model: nn.Module, what: str) -> None:
    """Raise `ModelError` if all weights of a model are frozen: AdamW needs at least one parameter."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"no weight of the {what} trains: requires_grad is False for all weights. Set requires_grad for the "
            "weights to train (requires_grad_(True) on the model for all), or train adapters (ppo.use_peft=true)"
        )


def build_optimizer(module: nn.Module, learning_rate: float, config: PPOConfig) -> torch.optim.Optimizer:
    """Return AdamW over the parameters that train.

    With weight decay there are two parameter groups: matrices decay; vectors (biases and weights of norms) do not.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [{"params": trained, "weight_decay": 0.0}]
    if config.weight_decay:
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    betas = (config.adam_beta1, config.adam_beta2)
    match config.optim:
        case "adamw_torch_fused":
            return AdamW(groups, lr=learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)
        case "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit

            optimizer = AdamW8bit(groups, lr=learning_rate, betas=betas, eps=config.adam_epsilon)
            return cast(torch.optim.Optimizer, optimizer)
        case unknown:
            assert_never(unknown)


def moment_bytes(parameter: Tensor, config: PPOConfig) -> int:
    """Return the bytes of AdamW's two moments of a parameter; in 8 bits each `BLOCK` of numbers has a 4-byte scale."""
    size = parameter.numel()
    if config.optim != EIGHT_BIT or size < FEWEST_IN_EIGHT_BITS:
        return 2 * parameter.nbytes
    return 2 * (size + 4 * math.ceil(size / BLOCK))


def saved_moments(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return an optimiser's moments, named `<parameter index>.<moment>`, and its parameter groups, all JSON-able."""
    # Call torch's state_dict, because bitsandbytes' own state_dict wraps the moments for FSDP
    saved = torch.optim.Optimizer.state_dict(optimizer)
    moments = {}
    for index, row in saved["state"].items():
        for key, value in row.items():
            # bitsandbytes' step count is a Python number, which is saved as a tensor.
            # Copy bitsandbytes' `qmap` tables, because all parameters share them.
            moments[f"{index}.{key}"] = value.clone() if key.startswith("qmap") else torch.as_tensor(value)
    return moments, saved["param_groups"]


_TABLES = {"qmap1", "qmap2", "absmax1", "absmax2"}
_MOMENTS = ({"step", "exp_avg", "exp_avg_sq"}, {"step", "state1", "state2"}, {"step", "state1", "state2", *_TABLES})
"""Names of the moments of one parameter: torch's, and bitsandbytes' in 32 and in 8 bits."""


def _shape_of_moment(key: str, parameter: Tensor) -> tuple[int, ...]:
    if key == "step":
        return ()
    if key in _TABLES:
        return (256,) if key.startswith("qmap") else (math.ceil(parameter.numel() / BLOCK),)
    return tuple(parameter.shape)


def load_moments(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
    """Load the moments and parameter groups that `saved_moments` returned.

    Raises:
        CheckpointError: A moment is NaN or infinite.
        LookupError, RuntimeError, ValueError: The moments are not the moments of the optimiser's parameters.
    """
    if (odd := not_finite(moments.items())) is not None:
        raise CheckpointError(f"the optimiser's moment {odd} holds NaN or infinity")
    rows: dict[int, dict[str, Any]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in moments.items():
        index, key = name.split(".", 1)
        # AdamW's kernel would read beyond the end of a moment of another shape
        expected = _shape_of_moment(key, parameters[int(index)])
        if value.shape != expected:
            raise ValueError(f"the optimiser's moment {name} has shape {tuple(value.shape)}, not {tuple(expected)}")
        # An int64 value is bitsandbytes' step count; torch's step count is float32
        is_count = value.dtype == torch.int64
        rows.setdefault(int(index), {})[key] = (
            value.item() if is_count else local_shard_of(value, parameters[int(index)])
        )
    for number, row in rows.items():
        if row.keys() not in _MOMENTS:
            raise ValueError(f"the optimiser's parameter {number} has the moments {', '.join(sorted(row))}")
    optimizer.load_state_dict({"state": rows, "param_groups": groups})


def peak_learning_rates(config: PPOConfig) -> tuple[float, float]:
    """Return the policy's and the critic's peak learning rate."""
    return config.learning_rate, config.value_learning_rate or config.learning_rate


def learning_rate_factor(config: PPOConfig, iteration: int, peak: float | None = None, resting: int = 0) -> float:
    """Return the factor by which an iteration multiplies a peak learning rate.

    transformers' schedules start the warm-up at 0 and end the decay at 0, but the factor returned here is never 0 while
    a model trains. Iteration i of a warm-up over w iterations has the factor i / w; an iteration i after the warm-up
    has the factor that transformers' schedule gives for step i - 1 of n steps.

    Args:
        config: Hyperparameters.
        iteration: The iteration, counted from 1.
        peak: The peak learning rate, None for the policy's. Only the polynomial schedule reads `peak`, to end at 1e-7.
        resting: The number of iterations at the start of the run in which the model does not train and the factor is
            0. The numbers i, n and w count only iterations in which the model trains.
    """
    iteration, total = iteration - resting, config.num_total_batches - resting
    if iteration < 1:
        return 0.0
    warmup, step = math.ceil(config.warmup_ratio * total), iteration - 1
    if step < warmup:
        return iteration / warmup
    name = "constant_with_warmup" if config.lr_scheduler_type == "constant" else config.lr_scheduler_type
    placeholder = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak or config.learning_rate)
    schedule = transformers.get_scheduler(name, placeholder, num_warmup_steps=warmup, num_training_steps=total)
    return float(schedule.lr_lambdas[0](step))


def set_learning_rates(
    policy_optimizer: torch.optim.Optimizer, critic_optimizer: torch.optim.Optimizer, config: PPOConfig, iteration: int
) -> None:
    """Set both optimisers' learning rates for an iteration, counted from 1.

    A shared trunk's value head without a rate of its own is in the policy's optimiser, which follows the critic's
    schedule in the first `ppo.critic_warmup_iterations` iterations, in which the policy does not train, and the
    policy's schedule afterwards.
    """
    policy_peak, critic_peak = peak_learning_rates(config)
    resting = config.critic_warmup_iterations
    policy_rate = policy_peak * learning_rate_factor(config, iteration, policy_peak, resting)
    critic_rate = critic_peak * learning_rate_factor(config, iteration, critic_peak)
    if policy_optimizer is critic_optimizer and iteration <= resting:
        policy_rate = critic_rate
    elif policy_optimizer is critic_optimizer:
        critic_rate = policy_rate
    for optimizer, rate in ((policy_optimizer, policy_rate), (critic_optimizer, critic_rate)):
        for group in optimizer.param_groups:
            group["lr"] = rate
