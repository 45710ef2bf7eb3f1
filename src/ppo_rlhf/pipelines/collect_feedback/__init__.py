"""Samples pairs of responses, and queues them in MLflow for people to compare."""

from ppo_rlhf.pipelines.collect_feedback.pipeline import create_pipeline

__all__ = ["create_pipeline"]
