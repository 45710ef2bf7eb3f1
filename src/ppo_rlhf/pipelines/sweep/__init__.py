"""One training for each setting of a grid and each seed, beside the chain."""

from ppo_rlhf.pipelines.sweep.pipeline import create_pipeline, create_training

__all__ = ["create_pipeline", "create_training"]
