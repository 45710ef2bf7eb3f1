"""TrainingState: everything that changes while PPO trains. The update steps its models, `advance` does the rest."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, TrainingError
from ppo_rlhf.core.kl import AdaptiveKLController, FixedKLController, KLController
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.models.averages import WeightAverage
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.models.forward import backbone_of, packs
from ppo_rlhf.ppo.kl_rules import kl_alarms
from ppo_rlhf.ppo.logprobs import CriticForward, PolicyForward
from ppo_rlhf.ppo.optimisers import build_optimizer, peak_learning_rates
from ppo_rlhf.ppo.precision import make_accelerator, wrap
from ppo_rlhf.ppo.sampling import SamplingSettings
from ppo_rlhf.processes import from_all

log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """Models, optimisers, controller and counters of one PPO run.

    Attributes:
        policy: The actor.
        critic: Its value function; a head alone if it shares the policy's trunk.
        tokenizer: The policy's.
        config: Hyperparameters; they do not change within a run.
        sampling: How responses are drawn, with the stop tokens resolved.
        accelerator: Wraps the forward passes, averages gradients over processes, and scales losses in float16.
        policy_forward: The policy's forward pass, wrapped by the accelerator; with a shared trunk the critic's, too.
        critic_forward: The critic's forward pass, wrapped likewise; None with a shared trunk.
        policy_optimizer: AdamW of the actor, and of the value head on a shared trunk.
        critic_optimizer: AdamW of the critic; with a shared trunk the same object as the policy's.
        kl_controller: Holds the current KL coefficient.
        reward_moments: Mean and variance of all scores so far, as the rewards gave them.
        iteration: Iterations done.
        episode: Responses trained on.
        optimiser_steps: Optimiser steps taken; one moves policy and critic. A skipped one does not count.
        skipped_steps: Optimiser steps that were not taken because of a non-finite gradient.
        skipped_in_a_row: Consecutive skipped steps, not counting float16 loss-scale overflows.
        early_stops: Iterations whose update ended early because of `target_kl`.
        policy_average: Moving average of the actor's weights, if `ema_decay` asks for one.
        history: The metrics of each iteration so far, with `iteration`.
        updating: True from the first optimiser step of an iteration until the iteration is complete.
        stop_requested: True once this process was asked to stop, for example by a signal.
        stopping: True once all processes agreed to stop after this iteration, which is saved.
        origin: Fingerprints of what a script began with: models, reward, prompts. The pipeline has them in MLflow.
    """

    policy: PreTrainedModel
    critic: Critic | SharedCritic
    tokenizer: PreTrainedTokenizerBase
    config: PPOConfig
    sampling: SamplingSettings
    accelerator: Accelerator
    policy_forward: nn.Module
    critic_forward: nn.Module | None
    policy_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    kl_controller: KLController
    reward_moments: RunningMoments
    iteration: int = 0
    episode: int = 0
    optimiser_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    early_stops: int = 0
    policy_average: WeightAverage | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    updating: bool = False
    stop_requested: bool = False
    stopping: bool = False
    origin: dict[str, str] = field(default_factory=dict)

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
        """Whether the architecture of policy or critic needs padding."""
        return not (packs(backbone_of(self.policy)) and packs(self.critic.backbone))

    @property
    def device(self) -> torch.device:
        """Where the models lie."""
        return self.policy.device

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Type of log-probabilities, entropies and values: float64 with weights in float64, else float32."""
        return torch.float64 if self.policy.dtype == torch.float64 else torch.float32

    @classmethod
    def create(
        cls,
        policy: PreTrainedModel,
        critic: Critic | SharedCritic,
        tokenizer: PreTrainedTokenizerBase,
        config: PPOConfig,
        sampling: SamplingSettings,
    ) -> TrainingState:
        """Start a run: fresh optimisers, counters at zero, forward passes wrapped for the run's processes.

        `ppo.models.build_state` checks and prepares the models for it.
        """
        shared = isinstance(critic, SharedCritic)
        accelerator = make_accelerator(
            config, policy.device, finds_unused=shared and config.critic_warmup_iterations > 0
        )
        policy_forward: nn.Module = PolicyForward(policy, critic, config.temperature)
        critic_forward = None if isinstance(critic, SharedCritic) else CriticForward(critic)
        policy_rate, critic_rate = peak_learning_rates(config)
        policy_optimizer = build_optimizer(policy_forward, policy_rate, config)
        critic_optimizer = policy_optimizer if critic_forward is None else build_optimizer(critic, critic_rate, config)
        return cls(
            policy=policy,
            critic=critic,
            tokenizer=tokenizer,
            config=config,
            sampling=sampling,
            accelerator=accelerator,
            policy_forward=wrap(accelerator, policy_forward),
            critic_forward=None if critic_forward is None else wrap(accelerator, critic_forward),
            policy_optimizer=policy_optimizer,
            critic_optimizer=critic_optimizer,
            kl_controller=build_kl_controller(config),
            reward_moments=RunningMoments(),
            policy_average=None if config.ema_decay is None else WeightAverage(policy, config.ema_decay),
        )

    def advance(self, scores: Tensor, metrics: dict[str, float]) -> None:
        """Complete an iteration after its update: counters, reward moments, KL controller, history, stopping.

        Args:
            scores: The scores `[B]` of the iteration's responses, as the rewards gave them.
            metrics: Those of the iteration; the KL controller reads `objective/kl`, and alarms on KL are logged.
        """
        self.iteration += 1
        self.episode += self.config.batch_size
        self.reward_moments.update(scores, scores.isfinite())  # a NaN would poison the running mean
        if self.iteration > self.config.held_iterations:
            self.kl_controller.update(metrics["objective/kl"], self.config.batch_size)
        self.history.append({"iteration": float(self.iteration), **metrics})
        for line in kl_alarms(self.config, self.history):
            log.warning(line)
        self.updating = False
        self.stopping = any(from_all(self.stop_requested))  # a signal may have reached one process only

    def check_whole(self) -> None:
        """Raise `TrainingError` if an update or the loading of a checkpoint ended half done."""
        if self.updating:
            raise TrainingError(
                f"an update, or a checkpoint's loading, was interrupted after iteration {self.iteration}: load a whole "
                "checkpoint (in PPOTrainer resume_from_checkpoint), or begin anew with models as they were"
            )

    def extra_state(self) -> dict[str, Any]:
        """Return the parts of a checkpoint beside weights, moments of the optimisers and counters; JSON-able."""
        return {**{name: part.state_dict() for name, part in self._parts()}, "early_stops": self.early_stops}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Resume from `extra_state()`'s result.

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
        parts = [(name, getattr(self, name)) for name in ("kl_controller", "reward_moments")]
        return parts if self.accelerator.scaler is None else [*parts, ("loss_scale", self.accelerator.scaler)]


def build_kl_controller(config: PPOConfig) -> KLController:
    """Return the controller that `ppo.kl_controller` asks for."""
    if config.kl_controller == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)
