"""Computes the metrics of one iteration, named as in docs/metrics.md; token averages exclude prompts and padding."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.statistics import correlation, explained_variance, masked_mean
from ppo_rlhf.passes.halvings import ROLLOUT_HALVINGS, UPDATE_HALVINGS
from ppo_rlhf.ppo.batch_sampling import Sampler, uniform_groups
from ppo_rlhf.ppo.experience import Experience, Shaping, kl_price
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.losses import CRITIC_TERMS, POLICY_TERMS, StepSums, coefficients, total
from ppo_rlhf.ppo.progress import LOGPROBS, REWARDS, SAMPLING, UPDATE, VALUES, Clock, Progress
from ppo_rlhf.ppo.rollouts import LOGPROB_GAP, Rollouts
from ppo_rlhf.rewards.combination_rules import DISAGREEMENT
from ppo_rlhf.rewards.shaping import deviations


def iteration_metrics(
    learner: Learner,
    sampler: Sampler,
    shaping: Shaping,
    progress: Progress,
    experience: Experience,
    steps: list[StepSums],
) -> dict[str, float]:
    """Return every metric of an iteration after its update, in the order of docs/metrics.md.

    `steps` are the statistics of all minibatches, summed over all processes. The averages leave out minibatches in
    which the losses count no token, unless all minibatches have no token.
    """
    config, kl_coef, scaler = learner.config, shaping.kl_controller.kl_coef, learner.accelerator.scaler
    halvings = {ROLLOUT_HALVINGS: sampler.halving.count, UPDATE_HALVINGS: learner.halving.count}
    metrics = {
        **_objective(experience, shaping),
        **_update(steps, config, kl_coef),
        **_responses(experience, config),
        "lr/policy": learner.policy_optimizer.param_groups[0]["lr"],
        "lr/value": learner.critic_optimizer.param_groups[0]["lr"],
        "episode": progress.episode + config.batch_size,
        "optimiser/steps": learner.optimiser_steps,
        "optimiser/skipped_steps": learner.skipped_steps,
        "optimiser/early_stops": learner.early_stops,
        "optimiser/loss_scale": 1.0 if scaler is None else scaler.get_scale(),
        **_speed(experience.rollouts, progress.clock),
        **_utilisation(experience.rollouts, steps, learner, progress.clock.seconds[UPDATE]),
        "memory/peak_bytes": peak_memory_bytes(learner.device),
        **{f"memory/{name}": count for name, count in halvings.items() if count},
    }
    return {name: float(value) for name, value in metrics.items()}


def _objective(experience: Experience, shaping: Shaping) -> dict[str, Tensor | float]:
    rollouts, scores, config = experience.rollouts, experience.scores, shaping.config
    mask, total, kl_coef = rollouts.mask, scores.total, shaping.kl_controller.kl_coef
    kl, penalty = rollouts.kl, rollouts.kl_penalty(config.kl_estimator).sum(-1).mean()
    apart = experience.disagreement
    return {
        "objective/kl": kl.sum(-1).mean(),
        "objective/kl_per_token": masked_mean(kl, mask),
        "objective/kl_estimate": penalty,
        "objective/entropy": masked_mean(rollouts.entropy, mask),
        "objective/non_score_reward": -kl_price(config, kl_coef) * penalty,
        "objective/rlhf_reward": experience.rewards.sum(-1).mean(),
        "objective/scores": total.mean(),
        "objective/scores_std": total.std(correction=min(1, len(total) - 1)),
        "objective/scores_p05": total.quantile(0.05),
        "objective/scores_p50": total.quantile(0.5),
        "objective/scores_p95": total.quantile(0.95),
        "objective/kl_coef": kl_coef,
        **{f"reward/{name}": component.mean() for name, component in scores.components.items()},
        **({} if apart is None else {f"reward/{DISAGREEMENT}": apart.mean()}),
        **{f"reward_std/{name}": std for name, std in deviations(scores, shaping.component_moments, config).items()},
    }


def _update(steps: list[StepSums], config: PPOConfig, kl_coef: float) -> dict[str, float]:
    every = [step for step in steps if step.tokens] or steps
    counted = [step for step in every if step.with_policy]

    def over_tokens(name: str, steps: list[StepSums] = counted) -> float:
        return statistics.fmean(step.mean(name) for step in steps)

    def over_steps(terms: Iterable[str], steps: list[StepSums]) -> dict[str, float]:
        return {name: statistics.fmean(step.sums[name] for step in steps) for name in terms}

    def taken(steps: list[StepSums]) -> list[StepSums]:
        return [step for step in steps if step.taken] or steps

    ratios = [step.mean("ratio") if step.tokens else 1.0 for step in counted]
    of_policy, of_critic = over_steps(POLICY_TERMS, counted), over_steps(CRITIC_TERMS, every)
    weights = coefficients(config, kl_coef)
    return {
        "policy/approxkl_avg": over_tokens("approxkl"),
        "policy/clipfrac_avg": over_tokens("policy_clipfrac"),
        "policy/grad_norm": statistics.fmean(step.policy_grad_norm for step in taken(counted)),
        **{f"loss/{name}_avg": loss for name, loss in (of_policy | of_critic).items()},
        "loss/total": total(of_policy, weights) + total(of_critic, weights),
        "val/clipfrac_avg": over_tokens("value_clipfrac", every),
        "val/ratio": statistics.fmean(ratios),
        "val/ratio_var": float(torch.tensor(ratios, dtype=torch.float64).var(correction=min(1, len(ratios) - 1))),
        "value/grad_norm": statistics.fmean(step.value_grad_norm for step in taken(every)),
    }


def _responses(experience: Experience, config: PPOConfig) -> dict[str, Tensor | float]:
    rollouts, gap = experience.rollouts, experience.rollouts.logprob_gap
    responses = rollouts.responses
    critic = experience.rollouts.values[:, :-1], experience.returns, rollouts.mask
    redrawn = {}
    if config.drop_uniform_prompts:
        uniform = len(uniform_groups(experience.scores.total, config.responses_per_prompt))
        redrawn = {"response/redraws": rollouts.redraws, "response/uniform_prompts": uniform / config.prompts_per_batch}
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
    if seconds[SAMPLING]:  # the sampling time is 0 if a user's script sampled the responses itself
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
"""Peak FLOP/s of GPUs for dense 16-bit matrix products on tensor cores, from NVIDIA's data sheets. The keys are words
of CUDA's device names."""


def _utilisation(rollouts: Rollouts, steps: list[StepSums], learner: Learner, seconds: float) -> dict[str, float]:
    """Return the model FLOP/s utilisation of the update (Chowdhery et al. 2022, appendix B) on a GPU of known peak.

    A model that trains counts 6 operations per weight and token; attention is left out. The returned dictionary is
    empty in float32 and float64, whose matrix products do not reach the 16-bit peak, and on devices of unknown peak.
    """
    words = (
        torch.cuda.get_device_name(learner.device).replace("-", " ").split() if learner.device.type == "cuda" else []
    )
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)
    if peak is None or learner.config.dtype not in ("bfloat16", "float16"):
        return {}
    tokens = sum(rollouts.prompts.lengths) + int(rollouts.responses.lengths.sum())
    policy, critic = (sum(p.numel() for p in model.parameters()) for model in (learner.policy, learner.critic))
    # Number of weights that train, summed over the epochs of the update
    epochs = sum(critic + policy * step.with_policy for step in steps) / learner.config.num_mini_batches
    return {"throughput/mfu": 6.0 * epochs * tokens / (seconds * peak * learner.accelerator.num_processes)}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far in bytes: GPU memory on a CUDA device, else the resident memory of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    kilobytes = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
