"""PPO: rollouts, scores, shaped rewards, advantages and the update, repeated by the LoopRunner."""

from ppo_rlhf.pipelines.ppo.pipeline import create_pipeline, create_preparation

__all__ = ["create_pipeline", "create_preparation"]
