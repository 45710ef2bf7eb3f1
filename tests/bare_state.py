"""A training state without models, for what only counts iterations and heeds requests."""

from __future__ import annotations

from typing import Any

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.ppo.training_state import TrainingState


def bare_state(iterations: int, iteration: int = 0, **settings: Any) -> TrainingState:
    """Return the state of a run of `iterations` iterations of four responses; it is saved at its end."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    saves = {"total_episodes": 4 * iterations, "save_interval": iterations}
    config = PPOConfig(**{**sizes, **saves, **settings})
    none: Any = None
    return TrainingState(config, none, none, none, Progress(config, iteration))
