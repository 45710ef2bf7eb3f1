"""Moments at which a run is interrupted, drawn over every phase from how long a run that nobody interrupted took."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from tests.integration.outcomes import Outcome

# six iterations, a checkpoint and an evaluation at every second one: a kill loses up to two iterations
ARGUMENTS = ("--env", "test", "--params", "ppo.total_episodes=96,ppo.save_interval=2")
RESUMING = (*ARGUMENTS[:-1], f"{ARGUMENTS[-1]},resume=latest")
PHASES = {
    "preparation": ("data_preparation.split_demonstrations", "save:demonstrations"),
    "fine-tuning": ("supervised_finetuning.train_sft_policy", "save:sft_policy"),
    "preferences": ("reward_modelling.collect_preferences", "save:preferences"),
    "reward training": ("reward_modelling.train_reward_model", "save:reward_model"),
    "start of PPO": ("ppo.prepare_prompts", "ppo.initialise_training_state", "ppo.evaluate_reference_policy"),
    "rollouts": ("ppo.generate_rollouts", "ppo.score_responses"),
    "update": ("ppo.optimise_policy",),
    "saving": ("save:checkpoint",),
    "evaluation while training": ("ppo.evaluate_iteration", "save:evaluation_metrics"),
    "after training": ("ppo.export_policy", "save:ppo_policy", "evaluation.evaluate_ppo_policy", "save:report"),
}


@dataclass(frozen=True)
class Interruption:
    """A signal at a moment: so many seconds into the n-th occurrence of a node or a save."""

    phase: str
    moment: str
    occurrence: int
    after_s: float

    def order(self, signal: str) -> str:
        """Return what `watched_run.Watch` takes."""
        place = {"occurrence": self.occurrence, "after_s": self.after_s}
        return json.dumps({"signal": signal, "moment": self.moment, **place})


@dataclass(frozen=True)
class Reference:
    """The run that nobody interrupted."""

    outcome: Outcome
    durations: dict[str, list[float]]

    def interruptions(self, phase: str, count: int, random: Random) -> list[Interruption]:
        """Draw moments of a phase: occurrences that differ as far as there are any, and places within them."""
        drawn = []
        for number in range(count):
            moment = PHASES[phase][number % len(PHASES[phase])]
            lengths = self.durations[moment]
            occurrence = (number // len(PHASES[phase])) % len(lengths)
            drawn.append(Interruption(phase, moment, occurrence + 1, random.uniform(0.0, 0.9) * lengths[occurrence]))
        return drawn


def two_at_a_time(check: Callable[[Interruption], str | None], interruptions: list[Interruption]) -> list[str]:
    """Return what a check found wrong of each interruption."""
    with ThreadPoolExecutor(2) as pool:
        return [text for text in pool.map(check, interruptions) if text is not None]
