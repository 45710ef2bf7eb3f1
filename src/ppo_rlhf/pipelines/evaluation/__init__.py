"""Evaluation: SFT against PPO on held-out prompts, with the same noise."""

from ppo_rlhf.pipelines.evaluation.pipeline import create_pipeline

__all__ = ["create_pipeline"]
