"""The public names for training in Python: `ModelConfig`, `PPOConfig`, `PPOTrainer` and `TrainingState`.

Each name is imported on first use, so that commands start without importing transformers. `_HOMES` gives the module of
each name.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "ModelConfig": "ppo_rlhf.trainer.trl_scripts",
    "PPOConfig": "ppo_rlhf.config",
    "PPOTrainer": "ppo_rlhf.trainer.trainer",
    "TrainingState": "ppo_rlhf.ppo.training_state",
}

__all__ = ["ModelConfig", "PPOConfig", "PPOTrainer", "TrainingState"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
