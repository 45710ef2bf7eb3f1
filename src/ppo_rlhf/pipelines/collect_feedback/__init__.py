"""Samples pairs of responses for people to compare, as a file and in a review queue of MLflow."""

from ppo_rlhf.pipelines.collect_feedback.pipeline import create_pipeline

__all__ = ["create_pipeline"]
