"""Trains only the critic, on the SFT policy's responses, and stores the critic."""

from ppo_rlhf.pipelines.critic_pretraining.pipeline import create_pipeline

__all__ = ["create_pipeline"]
