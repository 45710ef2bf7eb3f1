"""TrainingState: everything that changes while PPO trains. The update trains the models; `advance` updates the rest."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import CheckpointError, TrainingError
from ppo_rlhf.core.kl import FixedKLController
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.models.averages import WeightAverage
from ppo_rlhf.models.captures import Captures
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.models.forward import backbone_of, packs
from ppo_rlhf.ppo.engines import SamplingSettings
from ppo_rlhf.ppo.kl_rules import kl_alarms
from ppo_rlhf.rewards.scoring import Scores
from ppo_rlhf.runtime.processes import from_all

log = logging.getLogger(__name__)

COMPONENTS = "component_moments"
"""Key in a checkpoint's extra state of the reward components' moments; only with `reward.normalise=component`."""


SAMPLING, LOGPROBS, VALUES, REWARDS, UPDATE = "sampling", "log-probabilities", "values", "rewards", "update"
"""The timed parts of an iteration."""


class Clock:
    """Measures the seconds of each part of an iteration, and when the iteration began."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the clock at the beginning of an iteration."""
        self.started = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # seconds of each part so far

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that the block takes to a part."""
        entered = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - entered


@dataclass
class TrainingState:
    """Models, optimisers, controller and counters of one PPO run."""

    policy: PreTrainedModel
    critic: Critic | SharedCritic  # a SharedCritic is only a head on the policy's trunk
    tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer
    config: PPOConfig  # never changes within a run
    sampling: SamplingSettings  # has the stop token ids of this tokenizer and model
    captures: Captures  # CUDA graphs of the run's steps, and their buffers
    accelerator: Accelerator  # wraps the forward passes, and scales losses in float16
    policy_forward: nn.Module  # wrapped for several processes; with a shared trunk it also computes the values
    critic_forward: nn.Module | None  # wrapped for several processes; None with a shared trunk
    policy_optimizer: torch.optim.Optimizer  # steps the policy, and the value head on a shared trunk
    critic_optimizer: torch.optim.Optimizer  # the same object as policy_optimizer with a shared trunk
    kl_controller: FixedKLController  # holds the current KL coefficient
    reward_moments: RunningMoments  # mean and variance of all scores so far, before shaping
    iteration: int = 0  # iterations done
    episode: int = 0  # responses trained on
    optimiser_steps: int = 0  # steps taken, without skipped ones; each moves policy and critic
    skipped_steps: int = 0  # steps not taken because of a non-finite gradient
    skipped_in_a_row: int = 0  # consecutive skipped steps, not counting float16 loss-scale overflows
    micro_batch_tokens: int | None = None  # token budget of a micro-batch, if computed from the free memory
    early_stops: int = 0  # iterations whose update ended early because of `target_kl`
    policy_average: WeightAverage | None = None  # moving average of the policy's weights, with `ema_decay`
    component_moments: dict[str, RunningMoments] = field(default_factory=dict)  # with reward.normalise=component
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of each iteration, with `iteration`
    clock: Clock = field(default_factory=Clock)  # clock of the current iteration
    plain_update: str | None = None  # why the update runs without CUDA graphs although they are on
    updating: bool = False  # from the first optimiser step of an iteration until the iteration is complete
    stop_requested: bool = False  # this process was asked to stop, for example by a signal
    stopping: bool = False  # some process was asked to stop, so all processes save this iteration and stop
    ended: bool = False  # a callback ended training: no further iteration runs
    save_asked: bool = False  # a callback asked for this iteration's checkpoint
    evaluation_asked: bool = False  # a callback asked for this iteration's evaluation
    origin: dict[str, str] = field(default_factory=dict)  # fingerprints of a script's models, reward and prompts

    @property
    def total_iterations(self) -> int:
        """Iterations of the whole run."""
        return self.config.num_total_batches

    @property
    def finished(self) -> bool:
        """Whether the run is over: all iterations are done, or a callback ended training."""
        return self.ended or self.iteration >= self.total_iterations

    @property
    def checkpoint_due(self) -> bool:
        """Whether to save a checkpoint: every `save_interval` iterations, at the end, before a stop, and on request."""
        return self.finished or self.stopping or self.save_asked or self.iteration % self.config.save_interval == 0

    @property
    def shares_trunk(self) -> bool:
        """Whether policy and critic are one model: one forward pass, one loss, one optimiser."""
        return isinstance(self.critic, SharedCritic)

    @property
    def computes_padding(self) -> bool:
        """Whether the architecture of policy or critic needs padding."""
        return not (packs(backbone_of(self.policy)) and packs(self.critic.backbone))

    @property
    def forwards(self) -> list[nn.Module]:
        """The forward passes that train: the policy's, and the critic's if the critic has its own backbone."""
        return [forward for forward in (self.policy_forward, self.critic_forward) if forward is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimisers of policy and critic; a single one with a shared trunk."""
        return [self.policy_optimizer] + ([] if self.shares_trunk else [self.critic_optimizer])

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return self.policy.device

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Dtype of log-probabilities, entropies and values: float64 with float64 weights, else float32."""
        return compute_dtype(self.policy)

    def advance(self, scores: Scores, metrics: dict[str, float]) -> None:
        """Complete an iteration after its update: counters, reward moments, KL controller, history, alarms, stopping.

        `scores` are those of the iteration's responses before shaping, and `metrics` the iteration's metrics.
        """
        self.iteration += 1
        self.episode += self.config.batch_size
        self.reward_moments.update(scores.total, scores.total.isfinite())  # a NaN would stay in the running mean
        for name in scores.apart or ():
            component_scores = scores.components[name]
            moments = self.component_moments.setdefault(name, RunningMoments())
            moments.update(component_scores, component_scores.isfinite())
            if self.iteration == 1 and moments.m2 == 0.0:
                log.warning(
                    "reward/%s is %g for each of the first %d responses; normalised alone it adds 0 until it varies",
                    *(name, moments.mean, self.config.batch_size),
                )
        if self.iteration > self.config.held_iterations:
            self.kl_controller.update(metrics["objective/kl"], self.config.batch_size)
        self.history.append({"iteration": float(self.iteration), **metrics})
        for line in kl_alarms(self.config, self.history):
            log.warning(line)
        self.captures.say_once()
        self.updating = False
        self.stopping = any(from_all(self.stop_requested))  # a signal may have reached one process only

    def check_whole(self) -> None:
        """Raise `TrainingError` if an update or the loading of a checkpoint was interrupted."""
        if self.updating:
            raise TrainingError(
                f"an update, or the loading of a checkpoint, was interrupted after iteration {self.iteration}: load a "
                "whole checkpoint (in PPOTrainer resume_from_checkpoint), or start a new run from unchanged models"
            )

    def extra_state(self) -> dict[str, Any]:
        """Return the JSON-able parts of a checkpoint other than weights, optimiser moments and counters."""
        parts = {name: part.state_dict() for name, part in self._parts()}
        by_component = {name: moments.state_dict() for name, moments in self.component_moments.items()}
        return {**parts, "early_stops": self.early_stops, **({COMPONENTS: by_component} if by_component else {})}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Load the result of `extra_state`.

        Raises:
            CheckpointError: `extra`, or the state of one of its parts, has other keys than this version writes.
        """
        expected, given = (sorted({*keys} - {COMPONENTS}) for keys in (self.extra_state(), extra))
        if given != expected:
            raise CheckpointError(
                f"TrainingState.load_extra_state: got the keys {given}; {', '.join(expected)} are expected. "
                "The checkpoint is of another version of ppo_rlhf: resume with that version, or start a new run."
            )
        for name, part in self._parts():
            part.load_state_dict(extra[name])
        self.early_stops = int(extra["early_stops"])
        self.component_moments = {name: RunningMoments() for name in extra.get(COMPONENTS, {})}
        for name, moments in self.component_moments.items():
            moments.load_state_dict(extra[COMPONENTS][name])

    def _parts(self) -> list[tuple[str, Any]]:
        parts = [(name, getattr(self, name)) for name in ("kl_controller", "reward_moments")]
        return parts if self.accelerator.scaler is None else [*parts, ("loss_scale", self.accelerator.scaler)]
