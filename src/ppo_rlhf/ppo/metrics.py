"""The metrics of one iteration, named as in docs/metrics.md. Averages over tokens leave out prompts and padding."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import explained_variance, masked_mean
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.ppo.utilisation import device_name, update_utilisation


@dataclass(frozen=True)
class StepStatistics:
    """What one minibatch gave, 0-d tensors: losses, means over its tokens, gradient norms before clipping."""

    policy_loss: Tensor  # the clipped surrogate alone
    value_loss: Tensor  # before vf_coef
    kl: Tensor  # before kl_coef; 0 unless KL is in the loss
    entropy: Tensor  # before entropy_coef; 0 unless there is a bonus
    approxkl: Tensor
    policy_clipfrac: Tensor
    value_clipfrac: Tensor
    ratio: Tensor
    policy_grad_norm: Tensor
    value_grad_norm: Tensor
    tokens: int  # that its losses counted; with none it is no step


def iteration_metrics(
    experience: Experience,
    steps: list[StepStatistics],
    state: TrainingState,
    learning_rates: tuple[float, float],
    optimise_seconds: float,
) -> dict[str, float]:
    """Return every metric of an iteration, in the order of docs/metrics.md.

    Args:
        experience: What the update was done on.
        steps: One record for each minibatch. Those without a token are left out of the averages, unless all are.
        state: After the update, its counters advanced.
        learning_rates: The policy's and the critic's in this iteration.
        optimise_seconds: Duration of the update.
    """
    metrics = {
        **_objective(experience, state.config),
        **_update(steps, state.config, experience.shaped_rewards.kl_coef),
        **_responses(experience),
        "lr/policy": learning_rates[0],
        "lr/value": learning_rates[1],
        "episode": state.episode,
        "optimiser/steps": state.optimiser_steps,
        "optimiser/skipped_steps": state.skipped_steps,
        "optimiser/early_stops": state.early_stops,
        "optimiser/loss_scale": min(state.policy_scaler.get_scale(), state.critic_scaler.get_scale()),
        **_speed(experience, optimise_seconds),
        **_utilisation(experience, len(steps), state, optimise_seconds),
        "memory/peak_bytes": peak_memory_bytes(state.device),
    }
    return {name: float(value) for name, value in metrics.items()}


def _objective(experience: Experience, config: PPOConfig) -> dict[str, Tensor | float]:
    rollouts, shaped, scores = experience.rollouts, experience.shaped_rewards, experience.scores
    mask, total = rollouts.mask, scores.total
    kl_price = shaped.kl_coef if config.kl_in == "reward" else 0.0
    low, middle, high = torch.quantile(total, total.new_tensor([0.05, 0.5, 0.95]))
    return {
        "objective/kl": shaped.kl.sum(-1).mean(),
        "objective/kl_per_token": masked_mean(shaped.kl, mask),
        "objective/kl_estimate": shaped.kl_penalty.sum(-1).mean(),
        "objective/entropy": masked_mean(rollouts.entropy, mask),
        "objective/non_score_reward": -kl_price * shaped.kl_penalty.sum(-1).mean(),
        "objective/rlhf_reward": shaped.rewards.sum(-1).mean(),
        "objective/scores": total.mean(),
        "objective/scores_std": total.std(correction=min(1, len(total) - 1)),
        "objective/scores_p05": low,
        "objective/scores_p50": middle,
        "objective/scores_p95": high,
        "objective/kl_coef": shaped.kl_coef,
        **{f"reward/{name}": component.mean() for name, component in scores.components.items()},
    }


def _update(steps: list[StepStatistics], config: PPOConfig, kl_coef: float) -> dict[str, Tensor]:
    counted = [step for step in steps if step.tokens] or steps
    names = [field.name for field in fields(StepStatistics) if field.name != "tokens"]
    rows = {name: torch.stack([getattr(step, name) for step in counted]) for name in names}
    mean = {name: values.mean() for name, values in rows.items()}
    policy_terms = mean["policy_loss"] + kl_coef * mean["kl"] - config.entropy_coef * mean["entropy"]
    return {
        "policy/approxkl_avg": mean["approxkl"],
        "policy/clipfrac_avg": mean["policy_clipfrac"],
        "policy/grad_norm": mean["policy_grad_norm"],
        "loss/policy_avg": mean["policy_loss"],
        "loss/value_avg": mean["value_loss"],
        "loss/kl_avg": mean["kl"],
        "loss/entropy_avg": mean["entropy"],
        "loss/total": policy_terms + config.vf_coef * mean["value_loss"],
        "val/clipfrac_avg": mean["value_clipfrac"],
        "val/ratio": mean["ratio"],
        "val/ratio_var": rows["ratio"].var(correction=min(1, len(counted) - 1)),
        "value/grad_norm": mean["value_grad_norm"],
    }


def _responses(experience: Experience) -> dict[str, Tensor]:
    rollouts = experience.rollouts
    gap: dict[str, Tensor] = {}
    if rollouts.sampler_logprobs is not None:
        distance = (rollouts.sampler_logprobs.to(rollouts.old_logprobs.dtype) - rollouts.old_logprobs).abs()
        gap = {"policy/rollout_logprob_gap": masked_mean(distance, rollouts.mask)}
    return {
        **gap,
        "val/explained_variance": explained_variance(
            experience.scores.values[:, :-1], experience.returns, rollouts.mask
        ),
        "val/num_eos_tokens": rollouts.terminated.sum(),
        "response/length": rollouts.lengths.double().mean(),
        "response/truncated_fraction": (~rollouts.terminated).double().mean(),
    }


def _speed(experience: Experience, optimise_seconds: float) -> dict[str, float]:
    rollouts = experience.rollouts
    iteration_seconds = time.perf_counter() - rollouts.started
    rate: dict[str, float] = {}
    if rollouts.generation_seconds is not None:
        rate = {"throughput/generated_tokens_per_s": int(rollouts.lengths.sum()) / rollouts.generation_seconds}
    return {
        "time/rollout_s": rollouts.seconds,
        "time/score_s": experience.scores.seconds,
        "time/optimise_s": optimise_seconds,
        "time/iteration_s": iteration_seconds,
        "throughput/episodes_per_s": len(rollouts.lengths) / iteration_seconds,
        **rate,
    }


def _utilisation(experience: Experience, steps: int, state: TrainingState, optimise_seconds: float) -> dict[str, float]:
    share = update_utilisation(state, experience, steps, optimise_seconds, device_name(state.device))
    return {} if share is None else {"throughput/mfu": share}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: on the device if it is a CUDA device, else by this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    kilobytes = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
