"""Collects preferences, and trains a reward model on the preferences."""

from ppo_rlhf.pipelines.reward_modelling.pipeline import create_pipeline

__all__ = ["create_pipeline"]
