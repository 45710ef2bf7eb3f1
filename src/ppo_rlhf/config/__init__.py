"""`PPOConfig` with its rules and advice, and the decorator that validates settings groups. Does not import torch."""

from ppo_rlhf.config.ppo import MODEL_PATHS, LearningRateSchedule, PPOConfig

__all__ = ["MODEL_PATHS", "LearningRateSchedule", "PPOConfig"]
