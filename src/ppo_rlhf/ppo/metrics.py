"""The metrics of one iteration, named as in docs/metrics.md. Averages over tokens leave out prompts and padding."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import correlation, explained_variance, masked_mean
from ppo_rlhf.models.transfers import to_cpu
from ppo_rlhf.ppo.batch_sampling import uniform_groups
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.rollouts import LOGPROB_GAP, Rollouts
from ppo_rlhf.ppo.state import LOGPROBS, REWARDS, SAMPLING, UPDATE, VALUES, Clock, TrainingState
from ppo_rlhf.rewards.shaping import deviations
from ppo_rlhf.runtime.processes import gather_tensors

SUMMED = ("policy_loss", "value_loss", "kl", "entropy", "nll", "approxkl", "policy_clipfrac", "value_clipfrac", "ratio")
"""Fields of StepSums that add up over micro-batches and processes."""
FIRST_MEAN = SUMMED.index("approxkl")
"""From here on the fields are sums over tokens: of a micro-batch, its means times its tokens."""


@dataclass
class StepSums:
    """Statistics of one minibatch. Losses are parts of the minibatch's mean; the others are sums over its tokens.

    While the update runs, `own` holds this process's on the device; `add_over_processes` makes them numbers.
    """

    tokens: int  # that the losses of the whole minibatch count; if 0, no step is taken
    own: Tensor | None = None  # in the order of SUMMED
    policy_loss: float = 0.0  # only the clipped surrogate
    value_loss: float = 0.0  # before vf_coef
    kl: float = 0.0  # before kl_coef; 0 unless KL is in the loss
    entropy: float = 0.0  # before entropy_coef; 0 unless there is a bonus
    nll: float = 0.0  # of positive examples, before positive_coef; 0 unless there is one
    approxkl: float = 0.0
    policy_clipfrac: float = 0.0
    value_clipfrac: float = 0.0
    ratio: float = 0.0
    with_policy: bool = True  # False: only the critic took part
    policy_grad_norm: float = 0.0  # before clipping
    value_grad_norm: float = 0.0

    def add(self, found: Tensor, own_tokens: int) -> None:
        """Add a micro-batch with `own_tokens` counted tokens: `[9]` in the order of SUMMED, means where sums are kept.

        Means become sums, so ratios of 1 add up exactly.
        """
        found[FIRST_MEAN:] *= own_tokens
        self.own = found if self.own is None else self.own + found

    def mean(self, name: str) -> float:
        """Return the mean over tokens of a token sum."""
        return float(getattr(self, name)) / max(1, self.tokens)


def add_over_processes(steps: list[StepSums]) -> list[StepSums]:
    """Return the statistics of each step with the sums of all processes, as numbers."""
    none = torch.zeros(len(SUMMED))  # of a process without micro-batches
    own = torch.stack(to_cpu([none if step.own is None else step.own for step in steps])).double()
    sums = torch.stack(gather_tensors(own)).sum(0).tolist()
    return [
        replace(step, own=None, **dict(zip(SUMMED, row, strict=True))) for step, row in zip(steps, sums, strict=True)
    ]


def iteration_metrics(state: TrainingState, experience: Experience, steps: list[StepSums]) -> dict[str, float]:
    """Return every metric of an iteration after its update, before the state advances, in the order of docs/metrics.md.

    The steps are those of all minibatches, over all processes. Those without a token are left out of the averages,
    unless all are.
    """
    metrics = {
        **_objective(experience, state),
        **_update(steps, state.config, state.kl_controller.kl_coef),
        **_responses(experience, state.config),
        "lr/policy": state.policy_optimizer.param_groups[0]["lr"],
        "lr/value": state.critic_optimizer.param_groups[0]["lr"],
        "episode": state.episode + state.config.batch_size,
        "optimiser/steps": state.optimiser_steps,
        "optimiser/skipped_steps": state.skipped_steps,
        "optimiser/early_stops": state.early_stops,
        "optimiser/loss_scale": 1.0 if state.accelerator.scaler is None else state.accelerator.scaler.get_scale(),
        **_speed(experience.rollouts, state.clock),
        **_utilisation(experience.rollouts, steps, state),
        "memory/peak_bytes": peak_memory_bytes(state.device),
    }
    return {name: float(value) for name, value in metrics.items()}


def _objective(experience: Experience, state: TrainingState) -> dict[str, Tensor | float]:
    rollouts, scores, config = experience.rollouts, experience.scores, state.config
    mask, total, kl_coef = rollouts.mask, scores.total, state.kl_controller.kl_coef
    kl, penalty = rollouts.kl, rollouts.kl_penalty(config.kl_estimator).sum(-1).mean()
    return {
        "objective/kl": kl.sum(-1).mean(),
        "objective/kl_per_token": masked_mean(kl, mask),
        "objective/kl_estimate": penalty,
        "objective/entropy": masked_mean(rollouts.entropy, mask),
        "objective/non_score_reward": -(kl_coef if config.kl_in == "reward" else 0.0) * penalty,
        "objective/rlhf_reward": experience.rewards.sum(-1).mean(),
        "objective/scores": total.mean(),
        "objective/scores_std": total.std(correction=min(1, len(total) - 1)),
        "objective/scores_p05": total.quantile(0.05),
        "objective/scores_p50": total.quantile(0.5),
        "objective/scores_p95": total.quantile(0.95),
        "objective/kl_coef": kl_coef,
        **{f"reward/{name}": component.mean() for name, component in scores.components.items()},
        **{f"reward_std/{name}": std for name, std in deviations(scores, state.component_moments, config).items()},
    }


def _update(steps: list[StepSums], config: PPOConfig, kl_coef: float) -> dict[str, float]:
    every = [step for step in steps if step.tokens] or steps
    counted = [step for step in every if step.with_policy]

    def over_steps(name: str, steps: list[StepSums] = counted) -> float:
        return statistics.fmean(float(getattr(step, name)) for step in steps)

    def over_tokens(name: str, steps: list[StepSums] = counted) -> float:
        return statistics.fmean(step.mean(name) for step in steps)

    ratios = [step.mean("ratio") if step.tokens else 1.0 for step in counted]
    policy_terms = over_steps("policy_loss") + kl_coef * over_steps("kl") - config.entropy_coef * over_steps("entropy")
    policy_terms += config.positive_coef * over_steps("nll")
    return {
        "policy/approxkl_avg": over_tokens("approxkl"),
        "policy/clipfrac_avg": over_tokens("policy_clipfrac"),
        "policy/grad_norm": over_steps("policy_grad_norm"),
        "loss/policy_avg": over_steps("policy_loss"),
        "loss/value_avg": over_steps("value_loss", every),
        "loss/kl_avg": over_steps("kl"),
        "loss/entropy_avg": over_steps("entropy"),
        "loss/positive_avg": over_steps("nll"),
        "loss/total": policy_terms + config.vf_coef * over_steps("value_loss", every),
        "val/clipfrac_avg": over_tokens("value_clipfrac", every),
        "val/ratio": statistics.fmean(ratios),
        "val/ratio_var": float(torch.tensor(ratios, dtype=torch.float64).var(correction=min(1, len(ratios) - 1))),
        "value/grad_norm": over_steps("value_grad_norm", every),
    }


def _responses(experience: Experience, config: PPOConfig) -> dict[str, Tensor | float]:
    rollouts, gap = experience.rollouts, experience.rollouts.logprob_gap
    responses = rollouts.responses
    critic = experience.rollouts.values[:, :-1], experience.returns, rollouts.mask
    redrawn = {}
    if config.drop_uniform_prompts:
        alike = len(uniform_groups(experience.scores.total, config.responses_per_prompt))
        redrawn = {"response/redraws": rollouts.redraws, "response/uniform_prompts": alike / config.prompts_per_batch}
    return {
        **({} if gap is None else {LOGPROB_GAP: gap}),
        **redrawn,
        "val/explained_variance": explained_variance(*critic),
        "val/correlation": correlation(*critic),
        "val/num_eos_tokens": responses.terminated.sum(),
        "response/length": rollouts.mask.sum(-1).double().mean(),
        "response/truncated_fraction": (~responses.terminated).double().mean(),
        **({} if responses.policy_mask is None else {"response/turns": responses.turns().double().mean()}),
    }


def _speed(rollouts: Rollouts, clock: Clock) -> dict[str, float]:
    seconds, iteration_seconds = clock.seconds, time.perf_counter() - clock.started
    rate = {}
    if seconds[SAMPLING]:  # else the responses were sampled elsewhere
        rate = {"throughput/generated_tokens_per_s": int(rollouts.mask.sum()) / seconds[SAMPLING]}
    return {
        "time/rollout_s": seconds[SAMPLING] + seconds[LOGPROBS],
        "time/score_s": seconds[REWARDS] + seconds[VALUES],
        "time/optimise_s": seconds[UPDATE],
        "time/iteration_s": iteration_seconds,
        "throughput/episodes_per_s": len(rollouts.responses.lengths) / iteration_seconds,
        **rate,
    }


PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12, "L40S": 362e12}
"""Operations per second of GPUs, dense, with 16-bit inputs on tensor cores, by a part of CUDA's name; NVIDIA's data
sheets."""


def _utilisation(rollouts: Rollouts, steps: list[StepSums], state: TrainingState) -> dict[str, float]:
    """Return the model FLOP/s utilisation of the update (Chowdhery et al. 2022, appendix B) on a GPU of known peak.

    It counts 6 operations per weight and token for a model that trains, and leaves attention out. In float32 and
    float64 there is no such peak.
    """
    words = torch.cuda.get_device_name(state.device).replace("-", " ").split() if state.device.type == "cuda" else []
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)
    if peak is None or state.config.dtype not in ("bfloat16", "float16"):
        return {}
    tokens = sum(rollouts.prompts.lengths) + int(rollouts.responses.lengths.sum())
    policy, critic = (sum(p.numel() for p in model.parameters()) for model in (state.policy, state.critic))
    epochs = sum(critic + policy * step.with_policy for step in steps) / len(rollouts.epochs[0])  # in weights
    seconds = state.clock.seconds[UPDATE]
    return {"throughput/mfu": 6.0 * epochs * tokens / (seconds * peak * state.accelerator.num_processes)}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: on the device if it is a CUDA device, else by this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    kilobytes = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
