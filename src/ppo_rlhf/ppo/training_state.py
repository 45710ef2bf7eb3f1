"""`TrainingState`: the parts of a run that change in training, as one handle for the nodes, PPOTrainer and checkpoints.

A function below takes the parts that it needs: `Learner`, `Sampler`, `Shaping` or `Progress`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.core.statistics import RunningMoments
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.passes.halvings import ROLLOUT_HALVINGS, UPDATE_HALVINGS, Halving
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.experience import Shaping
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.rewards.scoring import Scores

COMPONENTS = "component_moments"
"""Key of the reward components' moments in a checkpoint's extra state."""


@dataclass
class TrainingState:
    """What changes in one PPO run. Each part has one owner; `config`, the run's settings, never changes."""

    config: PPOConfig
    learner: Learner  # policy and critic, their optimisers, and one optimiser step
    sampler: Sampler  # how responses are sampled and read
    shaping: Shaping  # KL controller and reward moments
    progress: Progress  # iterations, history, clock and requests
    # Fingerprints of the models, reward and prompts that a user's script passed
    origin: dict[str, str] = field(default_factory=dict)
    made_from: tuple[Origin, ...] = ()  # the models and tables that the policy and the critic are trained from

    @property
    def halvings(self) -> dict[str, Halving]:
        """The halvings that a checkpoint keeps, by their key there."""
        return {ROLLOUT_HALVINGS: self.sampler.halving, UPDATE_HALVINGS: self.learner.halving}

    def advance(self, scores: Scores, metrics: dict[str, float]) -> None:
        """Complete an iteration: update reward moments, KL controller, counters and history, and log alarms.

        `scores` are the scores of the iteration's responses before shaping, and `metrics` the iteration's metrics.
        """
        self.shaping.follow(scores, metrics["objective/kl"], self.progress.iteration + 1)
        self.progress.complete(metrics)

    def extra_state(self) -> dict[str, Any]:
        """Return the JSON-able parts of a checkpoint other than weights, optimiser moments and counters."""
        parts = {name: part.state_dict() for name, part in self._parts()}
        by_component = {name: moments.state_dict() for name, moments in self.shaping.component_moments.items()}
        return {**parts, "early_stops": self.learner.early_stops, COMPONENTS: by_component}

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
        self.learner.early_stops = int(extra["early_stops"])
        self.shaping.component_moments = {name: RunningMoments() for name in extra[COMPONENTS]}
        for name, moments in self.shaping.component_moments.items():
            moments.load_state_dict(extra[COMPONENTS][name])

    def _parts(self) -> list[tuple[str, Any]]:
        parts = [(name, getattr(self.shaping, name)) for name in ("kl_controller", "reward_moments")]
        scaler = self.learner.accelerator.scaler
        return parts if scaler is None else [*parts, ("loss_scale", scaler)]
