"""Pairs of responses that people compare in MLflow."""

from ppo_rlhf.pipelines.collect_feedback.pipeline import create_pipeline

__all__ = ["create_pipeline"]
