"""Comparison of two policies by people."""

from ppo_rlhf.pipelines.human_evaluation.pipeline import create_pipeline

__all__ = ["create_pipeline"]
