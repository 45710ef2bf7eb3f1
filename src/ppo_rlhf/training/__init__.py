"""PPOTrainer, supervised training, the memory plan and tuning advice. Imports neither Kedro nor MLflow.

`ModelConfig`, `PPOConfig`, `PPOTrainer` and `TrainingState` are imported from here on first use, so that the command
line need not wait for transformers.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "ModelConfig": "ppo_rlhf.training.trl_scripts",
    "PPOConfig": "ppo_rlhf.config",
    "PPOTrainer": "ppo_rlhf.training.trainer",
    "TrainingState": "ppo_rlhf.ppo.state",
}

__all__ = ["ModelConfig", "PPOConfig", "PPOTrainer", "TrainingState"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
