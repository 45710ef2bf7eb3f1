"""Trains only the critic, on the SFT policy's responses, and stores it."""

from ppo_rlhf.pipelines.critic_pretraining.pipeline import create_pipeline

__all__ = ["create_pipeline"]
