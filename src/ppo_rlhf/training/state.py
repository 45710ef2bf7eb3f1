"""TrainingState: all that changes while PPO trains. Only the update changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.kl import FixedKLController
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.tokenizers import stop_token_ids
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.generation import SamplingSettings
from ppo_rlhf.training.history import MetricHistory


@dataclass
class TrainingState:
    """Models, optimisers, controller and counters of one PPO run.

    Attributes:
        policy: The actor.
        critic: Its value function.
        tokenizer: The policy's.
        config: Hyperparameters; they do not change within a run.
        sampling: How responses are drawn, with the stop tokens resolved.
        policy_optimizer: AdamW of the actor.
        critic_optimizer: AdamW of the critic.
        kl_controller: Holds the current KL coefficient.
        iteration: Iterations done.
        episode: Responses trained on.
        optimiser_steps: Optimiser steps taken, by policy and critic together; a skipped one does not count.
        skipped_steps: Optimiser steps that neither took, for a non-finite loss or gradient of either.
        skipped_in_a_row: Of these, the ones since the last step taken.
        history: One row of metrics for each iteration done.
        stopping: True once the run was asked to stop: this iteration is saved, and is the last one in this process.
    """

    policy: PreTrainedModel
    critic: Critic
    tokenizer: PreTrainedTokenizerBase
    config: PPOConfig
    sampling: SamplingSettings
    policy_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    kl_controller: FixedKLController
    iteration: int = 0
    episode: int = 0
    optimiser_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    history: MetricHistory = field(default_factory=MetricHistory)
    stopping: bool = False

    @property
    def total_iterations(self) -> int:
        """Iterations of the whole run."""
        return self.config.num_total_batches

    @property
    def finished(self) -> bool:
        """True when no iteration is left to do."""
        return self.iteration >= self.total_iterations

    @property
    def shutdown_grace_s(self) -> float:
        """Seconds that the run may go on for after it was asked to stop, to finish and save an iteration."""
        return self.config.shutdown_grace_s

    @property
    def device(self) -> torch.device:
        """Where the models lie."""
        return self.policy.device

    @classmethod
    def create(
        cls,
        policy: PreTrainedModel,
        critic: Critic,
        tokenizer: PreTrainedTokenizerBase,
        config: PPOConfig,
    ) -> TrainingState:
        """Start a run: fresh optimisers, counters at zero.

        Raises:
            ConfigError: The stop token cannot be resolved with this tokenizer.
        """
        return cls(
            policy=policy,
            critic=critic,
            tokenizer=tokenizer,
            config=config,
            sampling=sampling_settings(config, tokenizer, policy),
            policy_optimizer=_adamw(policy, config.learning_rate),
            critic_optimizer=_adamw(critic, config.value_learning_rate or config.learning_rate),
            kl_controller=FixedKLController(config.kl_coef),
        )


def build_critic(config: PPOConfig, policy: PreTrainedModel, reward_model: PreTrainedModel | None) -> Critic:
    """Return the critic that `ppo.value_model` asks for.

    Raises:
        ConfigError: `reward_init` without a reward model.
        ModelError: `reward_init` from a reward model of another vocabulary, or without a linear score head.
    """
    if config.value_model == "separate":
        return Critic.from_policy(policy)
    if reward_model is None:
        raise ConfigError(
            "ppo.value_model=reward_init copies the critic from the reward model, but no reward component is of type "
            "model; set ppo.value_model=separate"
        )
    return Critic.from_reward_model(reward_model, policy)


def sampling_settings(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> SamplingSettings:
    """Return how responses are drawn with this tokenizer and model."""
    return SamplingSettings(
        response_length=config.response_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_token_ids=stop_token_ids(
            tokenizer,
            policy.generation_config,
            stop_token=config.stop_token,
            stop_token_id=config.stop_token_id,
        ),
        pad_token_id=int(tokenizer.pad_token_id),
    )


def learning_rate_factor(config: PPOConfig, iteration: int) -> float:
    """Return the factor on both peak learning rates in an iteration, counted from 1.

    transformers' schedules start a warm-up at 0 and end a decay at 0; here iteration i of a warm-up over w has the
    factor i / w, and after it step `iteration - 1` of `num_total_batches` is taken: no rate is ever 0.
    """
    warmup, total = config.warmup_iterations, config.num_total_batches
    step = iteration - 1
    if step < warmup:
        return iteration / warmup
    name = "constant_with_warmup" if config.lr_scheduler_type == "constant" else config.lr_scheduler_type
    placeholder = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, placeholder, num_warmup_steps=warmup, num_training_steps=total)
    return float(schedule.lr_lambdas[0](step))


def set_learning_rates(state: TrainingState, iteration: int) -> tuple[float, float]:
    """Set both optimisers' rates for an iteration, counted from 1, and return (policy's, critic's)."""
    factor = learning_rate_factor(state.config, iteration)
    peaks = (state.config.learning_rate, state.config.value_learning_rate or state.config.learning_rate)
    rates = (peaks[0] * factor, peaks[1] * factor)
    for optimizer, rate in zip((state.policy_optimizer, state.critic_optimizer), rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rates


def resolve_device(name: str) -> torch.device:
    """Return the device that a setting names: `auto` is CUDA where there is one.

    Raises:
        ConfigError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name} is not a device; use auto, cpu, cuda, or a number such as cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return device


def torch_dtype(config: PPOConfig) -> torch.dtype:
    """Return the torch type that `ppo.dtype` names."""
    return {"float32": torch.float32, "float64": torch.float64}[config.dtype]


def _adamw(module: torch.nn.Module, learning_rate: float) -> AdamW:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)
