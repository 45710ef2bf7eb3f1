"""Checks the user's demonstrations and holds out a part for evaluation."""

from ppo_rlhf.pipelines.data_preparation.pipeline import create_pipeline

__all__ = ["create_pipeline"]
