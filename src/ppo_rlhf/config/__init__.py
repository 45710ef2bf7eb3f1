"""`PPOConfig`, its rules and advice, what models allow, and how a group of settings becomes a class. No torch."""

from ppo_rlhf.config.ppo import MODEL_PATHS, LearningRateSchedule, PPOConfig

__all__ = ["MODEL_PATHS", "LearningRateSchedule", "PPOConfig"]
