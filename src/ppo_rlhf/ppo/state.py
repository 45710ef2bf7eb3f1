"""TrainingState: all that changes while PPO trains. Only the update changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.core.kl import AdaptiveKLController, FixedKLController, KLController
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.models.annotations import PreTrainedModel, PreTrainedTokenizerBase
from ppo_rlhf.models.averages import WeightAverage
from ppo_rlhf.models.critic import SharedCritic
from ppo_rlhf.models.forward import backbone_of, packs
from ppo_rlhf.models.own_configurations import keep_apart
from ppo_rlhf.models.passes.recorded_steps import RecordedSteps
from ppo_rlhf.models.products.compiled_shapes import keep_shapes_of_small_models
from ppo_rlhf.models.tokenizers import stop_token_ids
from ppo_rlhf.ppo.alarms import KLAlarms
from ppo_rlhf.ppo.build import AnyCritic, prepare_to_train, recorded_steps
from ppo_rlhf.ppo.history import MetricHistory
from ppo_rlhf.ppo.lanes import most_tokens_side_by_side
from ppo_rlhf.ppo.optimisers import build_optimizer, check_trains, peak_learning_rates
from ppo_rlhf.ppo.precision import loss_scaler
from ppo_rlhf.ppo.sampling import SamplingSettings


@dataclass
class TrainingState:
    """Models, optimisers, controller and counters of one PPO run.

    Attributes:
        policy: The actor.
        critic: Its value function; a head alone if it shares the policy's trunk.
        tokenizer: The policy's.
        config: Hyperparameters; they do not change within a run.
        sampling: How responses are drawn, with the stop tokens resolved.
        policy_optimizer: AdamW of the actor, and of the value head on a shared trunk.
        critic_optimizer: AdamW of the critic; with a shared trunk the same object as the policy's.
        policy_scaler: Scales the policy's loss in float16; does nothing otherwise.
        critic_scaler: The same for the critic's; with a shared trunk the same object.
        kl_controller: Holds the current KL coefficient.
        kl_alarms: Remembers which limits the KL has crossed.
        reward_moments: Mean and variance of all scores so far, as the rewards gave them.
        iteration: Iterations done.
        episode: Responses trained on.
        optimiser_steps: Optimiser steps taken; one moves policy and critic. A skipped one does not count.
        skipped_steps: Optimiser steps that the policy, the critic or both did not take, for a non-finite gradient.
        skipped_in_a_row: Of these, the ones since the last step taken, without those that loss scaling is to blame for.
        early_stops: Iterations whose update ended early because of `target_kl`.
        policy_average: Moving average of the actor's weights, if `ema_decay` asks for one.
        recorded_steps: The policy's decoding steps as CUDA graphs, with `cuda_graphs`.
        most_tokens_side_by_side: Up to how many tokens in an optimiser step, on average over an iteration, two models'
            passes run at the same time (`training.lanes`); 0: never.
        history: One row of metrics for each iteration done.
        stopping: True once the run was asked to stop: this iteration is saved, and is the last one in this process.
    """

    policy: PreTrainedModel
    critic: AnyCritic
    tokenizer: PreTrainedTokenizerBase
    config: PPOConfig
    sampling: SamplingSettings
    policy_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    policy_scaler: torch.amp.GradScaler
    critic_scaler: torch.amp.GradScaler
    kl_controller: KLController
    kl_alarms: KLAlarms
    reward_moments: RunningMoments
    iteration: int = 0
    episode: int = 0
    optimiser_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    early_stops: int = 0
    policy_average: WeightAverage | None = None
    recorded_steps: RecordedSteps | None = None
    most_tokens_side_by_side: float = 0.0
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
    def shares_trunk(self) -> bool:
        """Whether policy and critic are one model: one forward pass, one loss, one optimiser."""
        return isinstance(self.critic, SharedCritic)

    @property
    def computes_padding(self) -> bool:
        """Whether the architecture of policy or critic cannot do without padding."""
        return not (packs(backbone_of(self.policy)) and packs(self.critic.backbone))

    @property
    def device(self) -> torch.device:
        """Where the models lie."""
        return self.policy.device

    @classmethod
    def create(
        cls,
        policy: PreTrainedModel,
        critic: AnyCritic,
        tokenizer: PreTrainedTokenizerBase,
        config: PPOConfig,
    ) -> TrainingState:
        """Start a run: fresh optimisers, counters at zero.

        Raises:
            ConfigError: The stop token cannot be resolved with this tokenizer, or the policy cannot be decoded with
                `cuda_graphs`.
            ModelError: Gradient checkpointing does not fit an architecture, all weights of a model are frozen, or the
                policy has no stop token.
        """
        check_trains(policy, "policy")
        check_trains(critic, "critic")
        keep_shapes_of_small_models(policy.num_parameters())
        most_tokens = most_tokens_side_by_side(config, policy, on_cpu=policy.device.type == "cpu")
        if most_tokens:
            keep_apart(policy, critic)
        prepare_to_train(policy, critic, config)
        policy_rate, critic_rate = peak_learning_rates(config)
        policy_scaler = loss_scaler(config, policy.device)
        if isinstance(critic, SharedCritic):
            both = build_optimizer(nn.ModuleList([policy, critic]), policy_rate, config)
            policy_optimizer, critic_optimizer, critic_scaler = both, both, policy_scaler
        else:
            policy_optimizer = build_optimizer(policy, policy_rate, config)
            critic_optimizer = build_optimizer(critic, critic_rate, config)
            critic_scaler = loss_scaler(config, policy.device)
        return cls(
            policy=policy,
            critic=critic,
            tokenizer=tokenizer,
            config=config,
            sampling=sampling_settings(config, tokenizer, policy),
            policy_optimizer=policy_optimizer,
            critic_optimizer=critic_optimizer,
            policy_scaler=policy_scaler,
            critic_scaler=critic_scaler,
            kl_controller=build_kl_controller(config),
            kl_alarms=KLAlarms(config),
            reward_moments=RunningMoments(),
            recorded_steps=recorded_steps(policy, config),
            most_tokens_side_by_side=most_tokens,
            policy_average=None if config.ema_decay is None else WeightAverage(policy, config.ema_decay),
        )

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside weights, moments of the optimisers and counters; JSON-able."""
        return {**{name: part.state_dict() for name, part in self._parts()}, "early_stops": self.early_stops}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Go on from `extra_state()`'s result.

        Raises:
            CheckpointError: It holds other keys, or parts of another kind.
        """
        expected = sorted([*(name for name, _ in self._parts()), "early_stops"])
        if sorted(extra) != expected:
            raise CheckpointError(
                f"TrainingState.load_extra_state: got the keys {sorted(extra)}; {', '.join(expected)} are expected. "
                "The checkpoint was written by another version: go on with that one, or start afresh."
            )
        for name, part in self._parts():
            part.load_state_dict(extra[name])
        self.early_stops = int(extra["early_stops"])

    def _parts(self) -> list[tuple[str, Any]]:
        names = ("kl_controller", "kl_alarms", "reward_moments", "policy_scaler", "critic_scaler")
        return [(name, getattr(self, name)) for name in names]


def build_kl_controller(config: PPOConfig) -> KLController:
    """Return the controller that `ppo.kl_controller` asks for."""
    if config.kl_controller == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)


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
            vocabulary=policy.config.get_text_config().vocab_size,
        ),
        pad_token_id=int(tokenizer.pad_token_id),
        min_response_length=config.min_response_length,
    )


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
