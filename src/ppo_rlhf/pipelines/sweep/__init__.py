"""Sweep: one training for each setting of a grid and each seed."""

from ppo_rlhf.pipelines.sweep.pipeline import create_comparison, create_pipeline

__all__ = ["create_comparison", "create_pipeline"]
