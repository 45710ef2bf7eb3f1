"""The audit of the reward before PPO."""

from ppo_rlhf.pipelines.audit_reward.pipeline import create_pipeline

__all__ = ["create_pipeline"]
