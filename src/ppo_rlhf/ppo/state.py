"""`TrainingState` holds what changes in a PPO run: the update trains the models; `advance` updates all other state."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

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
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.passes.forward import backbone_of, packs
from ppo_rlhf.passes.halvings import ROLLOUTS, Halving, of_evaluations
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo.kl_alarms import kl_alarms
from ppo_rlhf.ppo.requests import RunRequests
from ppo_rlhf.rewards.scoring import Scores
from ppo_rlhf.runtime.processes import from_all

if TYPE_CHECKING:
    from ppo_rlhf.ppo.rollouts import UpdatePlan

log = logging.getLogger(__name__)

COMPONENTS = "component_moments"
"""Key of the reward components' moments in a checkpoint's extra state; the key exists only with
`reward.normalise=component` or a `reward.combine` other than `sum`."""


SAMPLING, LOGPROBS, VALUES, REWARDS, UPDATE = "sampling", "log-probabilities", "values", "rewards", "update"
"""Names of the timed parts of an iteration, which are the keys of `Clock.seconds`."""


SAVED_FIRST_S = 60.0
"""The first iteration of a run is saved if it took longer than `SAVED_FIRST_S` seconds."""
SAVING_SHARE = 0.05
"""Greatest share of the time that checkpoints by time take."""


class Clock:
    """Measures how many seconds each part of an iteration takes, and stores when the iteration began.

    `Clock` also says when time asks for a checkpoint.
    """

    def __init__(self) -> None:
        self.restart()
        self.saved_at = self.started  # when the last checkpoint was complete; before the first, when the run began
        self.save_seconds = 0.0  # how long the last checkpoint took

    def restart(self) -> None:
        """Reset the clock at the beginning of an iteration."""
        self.started = self.entered = time.perf_counter()  # when the iteration, and its last timed part, began
        # Seconds that each part of the iteration has taken so far
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that the `with` block takes to `part` of the iteration."""
        self.entered = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - self.entered

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Store when the `with` block, which writes a checkpoint, ended, and how many seconds it took."""
        entered = time.perf_counter()
        yield
        self.saved_at = time.perf_counter()
        self.save_seconds = self.saved_at - entered

    def asks_to_save(self, minutes: float | None, iteration: int) -> bool:
        """Return whether an iteration that ends now is saved, with `ppo.save_interval_minutes` at `minutes`."""
        if minutes is None:
            return False
        now = time.perf_counter()
        is_long_first = iteration == 1 and now - self.started > SAVED_FIRST_S
        wait = max(60.0 * minutes, (1.0 / SAVING_SHARE - 1.0) * self.save_seconds)
        return is_long_first or now - self.saved_at >= wait


@dataclass
class TrainingState:
    """Models, optimisers, controller and counters of one PPO run."""

    policy: PreTrainedModel
    # The critic: a model of its own, or (SharedCritic) a value head on the policy's trunk
    critic: Critic | SharedCritic
    tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer
    config: PPOConfig  # the run's settings, which never change within a run
    sampling: SamplingSettings  # the run's sampling settings, with the stop token ids of the policy's responses
    accelerator: Accelerator  # accelerate's Accelerator, which wraps the forward passes, and scales losses in float16
    # The policy's forward pass, wrapped by DDP for several processes; with a shared trunk it also returns the values
    policy_forward: nn.Module
    # The critic's forward pass, wrapped by DDP for several processes; None with a shared trunk
    critic_forward: nn.Module | None
    policy_optimizer: torch.optim.Optimizer  # optimiser of the policy
    # Optimiser of the critic, or of the value head on a shared trunk; the same object as policy_optimizer if the value
    # head on a shared trunk has no learning rate of its own
    critic_optimizer: torch.optim.Optimizer
    kl_controller: FixedKLController  # the KL controller, which holds the current KL coefficient
    reward_moments: RunningMoments  # mean and variance of all scores so far, before reward shaping
    iteration: int = 0  # number of complete iterations
    episode: int = 0  # number of responses trained on
    optimiser_steps: int = 0  # number of optimiser steps taken, without skipped steps; one step moves policy and critic
    skipped_steps: int = 0  # number of optimiser steps skipped because of a non-finite gradient
    # Number of consecutive skipped steps, not counting overflows that lower float16's loss scale
    skipped_in_a_row: int = 0
    # Token budget of a micro-batch, computed from the free memory; None: the budget is not computed from the memory
    micro_batch_tokens: int | None = None
    # Halvings of the responses that a process samples or scores at a time, and of the micro-batches of updates. Until
    # `agree_on_halvings`, before an update and after each minibatch, they count what happened in this process
    rollout_halving: Halving = field(default_factory=partial(Halving, "a rollout", ROLLOUTS))
    update_halving: Halving = field(
        default_factory=partial(
            Halving,
            "an update",
            "ppo.per_device_train_batch_size",
            "half of ppo.per_device_train_batch_size and twice ppo.gradient_accumulation_steps",
        )
    )
    # Halvings of the responses of evaluations during training, in this process; a resumed run begins anew
    evaluation_halving: Halving = field(default_factory=of_evaluations)
    early_stops: int = 0  # number of iterations whose update ended early because of `target_kl`
    policy_average: WeightAverage | None = None  # moving average of the policy's weights; None without `ema_decay`
    # Running mean and variance of each reward component's scores; empty unless `Scores.measured` names components
    component_moments: dict[str, RunningMoments] = field(default_factory=dict)
    # Metrics of each complete iteration; the key `iteration` has the iteration's number
    history: list[dict[str, float]] = field(default_factory=list)
    plan: UpdatePlan | None = None  # how the current iteration's update cuts its responses; `ppo.rollouts` makes it
    clock: Clock = field(default_factory=Clock)  # clock that times the parts of the current iteration
    minibatches: int = 0  # minibatches of this process, which a resumed run counts anew
    exchanged: bool = False  # True if the other processes wait for this process's gradients of the current minibatch
    updating: bool = False  # True from an iteration's first optimiser step until the iteration is complete
    requests: RunRequests = field(default_factory=RunRequests)  # requests to stop the run, to save and to evaluate
    # Iteration of the best evaluation so far (0: SFT's), whose checkpoint is kept; None unless
    # `evaluation.on_exploitation` is `stop`
    best_evaluation: int | None = None
    # Iteration whose policy and critic were loaded after the end of training; None: they are those of `iteration`
    loaded_iteration: int | None = None
    # Fingerprints of the models, reward and prompts that a user's script passed
    origin: dict[str, str] = field(default_factory=dict)

    @property
    def total_iterations(self) -> int:
        """Number of iterations of the whole run."""
        return self.config.num_total_batches

    @property
    def finished(self) -> bool:
        """Whether the run is over: all iterations are done, or a callback or an evaluation ended training."""
        return self.requests.end or self.iteration >= self.total_iterations

    @property
    def policy_iteration(self) -> int:
        """The iteration that the policy is of: the last one, unless `load_best` went back to the best evaluation."""
        return self.iteration if self.loaded_iteration is None else self.loaded_iteration

    @property
    def checkpoint_due(self) -> bool:
        """Whether to save a checkpoint now.

        A checkpoint is due every `save_interval` iterations, when the run ends, and when a request asks for one.
        """
        return self.finished or self.requests.ask_to_save or self.iteration % self.config.save_interval == 0

    @property
    def shares_trunk(self) -> bool:
        """Whether policy and critic share one model, and so one forward pass and one loss."""
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
        """The optimisers of policy and critic; one, if the value head on a shared trunk has no rate of its own."""
        is_one = self.critic_optimizer is self.policy_optimizer
        return [self.policy_optimizer] if is_one else [self.policy_optimizer, self.critic_optimizer]

    @property
    def device(self) -> torch.device:
        """Device of policy and critic."""
        return self.policy.device

    @property
    def statistics_dtype(self) -> torch.dtype:
        """Dtype of log-probabilities, entropies and values: float64 with float64 weights, else float32."""
        return compute_dtype(self.policy)

    @property
    def halvings(self) -> dict[str, Halving]:
        """The halvings by the name of their metric and of their key in a checkpoint."""
        return {"rollout_halvings": self.rollout_halving, "update_halvings": self.update_halving}

    def agree_on_halvings(self) -> None:
        """Halve in every process as often as in the process whose memory ran out most often."""
        counts = from_all([halving.count for halving in self.halvings.values()])
        for halving, by_process in zip(self.halvings.values(), zip(*counts, strict=True), strict=True):
            halving.count = max(by_process)

    def advance(self, scores: Scores, metrics: dict[str, float]) -> None:
        """Complete an iteration: update counters, reward moments, KL controller and history, and log alarms.

        `scores` are the scores of the iteration's responses before shaping, and `metrics` the iteration's metrics.
        """
        self.iteration += 1
        self.episode += self.config.batch_size
        # Update with finite scores only, because a NaN would stay in the running mean
        self.reward_moments.update(scores.total, scores.total.isfinite())
        for name in scores.measured:
            component_scores = scores.components[name]
            moments = self.component_moments.setdefault(name, RunningMoments())
            moments.update(component_scores, component_scores.isfinite())
            if self.iteration == 1 and moments.m2 == 0.0 and scores.apart is not None:
                log.warning(
                    "reward/%s is %g for each of the first %d responses; normalised alone it adds 0 until it varies",
                    *(name, moments.mean, self.config.batch_size),
                )
        # The controller follows KL from the policy's first iteration on, as in TRL, verl and OpenRLHF. KL starts at 0,
        # so beta falls at first: with `kl_horizon` at a fifth of the episodes by 1 % in the first 1 % of the iterations
        if self.iteration > self.config.critic_warmup_iterations:
            self.kl_controller.update(metrics["objective/kl"], self.config.batch_size)
        self.history.append({"iteration": float(self.iteration), **metrics})
        for line in kl_alarms(self.config, self.history):
            log.warning(line)
        self.updating = False
        self.requests.agree(save_by_time=self.clock.asks_to_save(self.config.save_interval_minutes, self.iteration))

    def update_left(self) -> float | None:
        """Return about how many seconds the rest of this update and a checkpoint take; None in the first update."""
        if not self.history:
            return None
        left = self.history[-1]["time/optimise_s"] - (time.perf_counter() - self.clock.entered)
        return max(0.0, left) + self.clock.save_seconds

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
        return {**parts, "early_stops": self.early_stops, COMPONENTS: by_component}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Load the result of `extra_state`.

        Raises:
            CheckpointError: `extra`, or the state of the KL controller, the reward moments or the loss scale in
                `extra`, has other keys than this version of ppo_rlhf writes.
        """
        expected, given = (sorted(keys) for keys in (self.extra_state(), extra))
        if given != expected:
            raise CheckpointError(
                f"TrainingState.load_extra_state: got the keys {given}; {', '.join(expected)} are expected. "
                "The checkpoint is of another version of ppo_rlhf: resume with that version, or start a new run."
            )
        for name, part in self._parts():
            part.load_state_dict(extra[name])
        self.early_stops = int(extra["early_stops"])
        self.component_moments = {name: RunningMoments() for name in extra[COMPONENTS]}
        for name, moments in self.component_moments.items():
            moments.load_state_dict(extra[COMPONENTS][name])

    def _parts(self) -> list[tuple[str, Any]]:
        parts = [(name, getattr(self, name)) for name in ("kl_controller", "reward_moments")]
        return parts if self.accelerator.scaler is None else [*parts, ("loss_scale", self.accelerator.scaler)]
