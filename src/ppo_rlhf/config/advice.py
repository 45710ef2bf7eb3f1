"""Advice on legal settings of PPO that are unusual or have little effect, and on names that are no settings of it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args, get_type_hints

if TYPE_CHECKING:
    from ppo_rlhf.config import PPOConfig

HORIZONS_NEEDED = 5  # the controller moves by at most 20 % per horizon: five horizons give a factor of e


@dataclass(frozen=True)
class Typical:
    """Usual range of a setting; a value outside it gives advice, not an error."""

    low: float
    high: float
    source: str
    is_rate: bool = False
    """A learning rate: the range is that of policies of LARGE parameters or more, with LoRA LORA_FACTOR times it."""


TUNING_GUIDE = "common practice in RLHF tuning guides"
INSTRUCT_GPT = "InstructGPT (arXiv:2203.02155)"
LARGE = 1e8
"""No guide has learning rates of smaller policies, which are larger; GPT-2 small is the smallest in common use."""
LORA_FACTOR = 10.0
"""LoRA Without Regret (Schulman et al. 2025)."""


def _hints(c: PPOConfig) -> Iterator[tuple[set[str], str]]:
    """Yield what is of little or another effect than one might expect, with the settings that it depends on."""
    if c.kl_in == "reward" and c.kl_estimator == "full":
        yield (
            {"kl_estimator", "kl_in"},
            "ppo.kl_estimator=full with ppo.kl_in=reward charges a token only for where it leads, never for itself: "
            "the KL of a state does not depend on the token drawn there. Use k1 in the reward, or full in the loss",
        )
    elif c.kl_in == "reward" and c.kl_estimator != "k1":
        yield (
            {"kl_estimator", "kl_in"},
            f"ppo.kl_estimator={c.kl_estimator} with ppo.kl_in=reward makes rare tokens even rarer: training misses "
            "the optimum of the KL penalty (by a total variation of 0.2 to 0.7 on a bandit). Use k1 in the reward, or "
            "ppo.kl_in=loss with k2",
        )
    if c.kl_in == "loss" and c.kl_estimator == "k3":
        yield (
            {"kl_estimator", "kl_in"},
            "ppo.kl_estimator=k3 with ppo.kl_in=loss has the gradient of KL(reference || policy), not of "
            "KL(policy || reference), so its optimum differs; k2 has the usual optimum",
        )
    if c.kl_controller == "adaptive" and c.total_episodes < HORIZONS_NEEDED * c.kl_horizon:
        yield (
            {"kl_controller", "kl_horizon", "total_episodes"},
            f"ppo.total_episodes={c.total_episodes} is less than {HORIZONS_NEEDED} x ppo.kl_horizon={c.kl_horizon:g}: "
            "the coefficient changes by at most 20 % per horizon and hardly moves in this run; "
            f"set ppo.kl_horizon to {c.total_episodes / HORIZONS_NEEDED:g} or less",
        )
    if c.value_model != "shared":
        yield (
            {"vf_coef"},
            f"ppo.vf_coef={c.vf_coef:g} has next to no effect with ppo.value_model={c.value_model}: the critic has an "
            "optimiser of its own, and Adam's step does not depend on the scale of the loss. Set "
            "ppo.value_learning_rate instead",
        )
    if c.deterministic and c.local_rollout_forward_batch_size is None:
        yield (
            {"deterministic", "local_rollout_forward_batch_size"},
            "ppo.deterministic=true with ppo.local_rollout_forward_batch_size=null: how many responses are decoded at "
            "a time, and so their rounding, depends on the free memory. Give it a number",
        )
    if c.importance_cap is not None and (c.top_k > 0 or c.top_p < 1.0 or c.min_response_length > 0):
        yield (
            {"importance_cap", "top_k", "top_p", "min_response_length"},
            "ppo.importance_cap corrects the rounding of the decoding loop, but not the filters ppo.top_k, ppo.top_p "
            "and ppo.min_response_length: the weights compare with the unfiltered distribution",
        )


def advice(config: PPOConfig, given: Container[str] | None, parameters: int | None) -> list[str]:
    """Return one line for each changed setting that is unusual or of little effect; see `PPOConfig.advice`."""
    changed = {name: value for name, value in config.not_default().items() if given is None or name in given}
    ranges, lines = _typical_ranges(type(config)), []
    for name, value in changed.items():
        usual = ranges.get(name)
        if usual is None or value is None or (usual.is_rate and (parameters or 0) < LARGE):
            continue
        lora = usual.is_rate and config.use_peft
        low, high = (end * (LORA_FACTOR if lora else 1.0) for end in (usual.low, usual.high))
        if not low <= value <= high:
            where = f"its typical range {'with LoRA ' if lora else ''}{low:g} to {high:g} ({usual.source})"
            lines.append(f"ppo.{name}={value} is outside {where}")
    return lines + [line for names, line in _hints(config) if changed.keys() & names]


def _typical_ranges(config_class: type) -> dict[str, Typical]:
    hints = get_type_hints(config_class, include_extras=True)
    options = ((name, option) for name, hint in hints.items() for option in (hint, *get_args(hint)))
    marks = ((name, mark) for name, option in options for mark in getattr(option, "__metadata__", ()))
    return {name: mark for name, mark in marks if isinstance(mark, Typical)}


LIVES_ELSEWHERE = {
    "model_name": "it is sft_model_path, a global of the pipeline",
    "model_name_or_path": "it is sft_model_path, a global of the pipeline",
    "reward_model": "it is PPOTrainer's argument reward, or reward_model_path",
    "dataset_name": "it is PPOTrainer's argument prompts, or prompts_path, a global of the pipeline",
    "output_dir": "it is an argument of PPOTrainer.train; the pipeline's outputs are catalog entries",
    "save_steps": "it is ppo.save_interval, counted in iterations",
    "save_strategy": "it is ppo.save_interval, counted in iterations",
    "eval_steps": "it is ppo.eval_interval, counted in iterations",
    "eval_strategy": "it is ppo.eval_interval, counted in iterations",
    "logging_steps": "every iteration is logged; ppo.sample_interval sets how often samples are",
    "run_name": "PPOTrainer's runs have no name; the pipeline's is tracking.run.name in mlflow.yml",
    "bf16": "precision is ppo.dtype",
    "fp16": "precision is ppo.dtype",
    "num_train_epochs": "the length of training is ppo.total_episodes",
    "max_steps": "the length of training is ppo.total_episodes",
    "steps": "the length of training is ppo.total_episodes",
    "warmup_steps": "it is ppo.warmup_ratio, a share of the iterations",
    "num_sample_generations": "it is ppo.sample_interval, the iterations from one sample to the next",
    "resume_from_checkpoint": "it is an argument of PPOTrainer.train; the pipeline has the parameter resume",
    "micro_batch_size": "it is computed: ppo.per_device_train_batch_size x processes",
    "local_batch_size": "it is computed: ppo.per_device_train_batch_size x ppo.gradient_accumulation_steps",
    "batch_size": "it is per_device_train_batch_size x gradient_accumulation_steps x processes",
    "mini_batch_size": "it is batch_size / ppo.num_mini_batches",
    "local_mini_batch_size": "it is mini_batch_size / processes; ppo.num_mini_batches sets it",
    "num_total_batches": "it is ppo.total_episodes / batch_size, rounded up",
    "forward_batch_size": "it is ppo.per_device_train_batch_size",
    "backward_batch_size": "an optimiser step takes batch_size / ppo.num_mini_batches responses",
    "per_device_eval_batch_size": "it is evaluation.batch_size in the pipeline; PPOTrainer evaluates 64 at a time",
    "early_stopping": "it is ppo.target_kl; without one nothing ends an update early",
    "ppo_epochs": "it is ppo.num_ppo_epochs",
    "init_kl_coef": "it is ppo.kl_coef",
    "adap_kl_ctrl": "it is ppo.kl_controller=adaptive",
    "target": "it is ppo.kl_target",
    "horizon": "it is ppo.kl_horizon",
    "kl_penalty": "it is ppo.kl_estimator",
    "kl_ctl": "it is ppo.kl_coef",
    "score_clip": "it is ppo.reward_clip",
    "clip_reward_value": "it is ppo.reward_clip",
    "use_score_norm": "it is ppo.reward_normalisation=running",
    "lr_scheduler_kwargs": "ppo.lr_scheduler_type has the schedules that need no arguments",
    "optim_target_modules": "the optimiser steps every weight that trains",
    "activation_checkpointing": "it is ppo.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "ppo.gradient_checkpointing has no arguments",
    "torch_compile": "it is ppo.compile",
    "use_cpu": "it is ppo.device=cpu",
    "no_cuda": "it is ppo.device=cpu",
    "data_seed": "everything random is a function of ppo.seed",
    "log_with": "it is ppo.report_to",
    "fsdp": "sharding is FSDP2, set in accelerate's file (docs/scaling.md)",
    "fsdp_config": "sharding is FSDP2, set in accelerate's file (docs/scaling.md)",
    "deepspeed": "sharding is FSDP2, set in accelerate's file (docs/scaling.md)",
    "full_determinism": "it is ppo.deterministic",
    "align_overflow": "a non-finite gradient of policy or critic always skips the step of both",
    "use_vllm": "it is ppo.rollout_engine=vllm",
    "vllm_importance_sampling_clip_max": "it is ppo.importance_cap",
    "lora_rank": "it is ppo.lora_r",
    "load_in_8bit": "quantised weights have 4 bits: ppo.load_in_4bit",
    "lora_dropout": "dropout is always off: with it the policy that trains would not be the one that sampled",
}
"""Settings of transformers, TRL and others that are no fields of PPOConfig, each with where it is."""
