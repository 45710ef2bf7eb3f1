"""KL and reward of trainings with different KL penalties, with best-of-n as the baseline."""

from ppo_rlhf.pipelines.kl_study.pipeline import create_pipeline

__all__ = ["create_pipeline"]
