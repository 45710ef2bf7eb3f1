"""Evaluation: compares PPO with SFT on held-out prompts, with the same sampling noise."""

from ppo_rlhf.pipelines.evaluation.pipeline import create_pipeline

__all__ = ["create_pipeline"]
