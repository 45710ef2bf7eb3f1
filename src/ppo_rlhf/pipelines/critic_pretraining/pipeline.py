"""Wiring of the critic's pretraining."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import ppo
from ppo_rlhf.pipelines.critic_pretraining import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Wire the pretraining: PPO's first nodes, then the training of the critic."""
    prompts = ["prompt_dataset", "evaluation_prompt_dataset"]
    own = named(
        nodes.pretrain_critic,
        ["sft_policy", *prompts, "reward_scorer", "ppo_config", "params:critic_pretraining"],
        ["pretrained_critic", "critic_metrics"],
    )
    return Pipeline([ppo.create_preparation(), stage("critic_pretraining", own)])
