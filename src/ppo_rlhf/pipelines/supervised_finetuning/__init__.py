"""Fine-tunes a language model on demonstrations, or trains a small one from scratch."""

from ppo_rlhf.pipelines.supervised_finetuning.pipeline import create_pipeline

__all__ = ["create_pipeline"]
