"""The reward modelling pipeline."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.reward_modelling import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Wire the preferences, which are given or sampled, and the training of the reward model."""
    sampled = ["sft_policy", "raw_prompts", "raw_evaluation_prompts"]
    return stage(
        "reward_modelling",
        named(nodes.check_preferences, ["raw_preferences", "params:reward_modelling"], "checked_preferences"),
        named(
            nodes.collect_preferences,
            ["checked_preferences", *sampled, "params:reward_modelling", "params:ppo", "params:prompts"],
            "preferences",
        ),
        named(
            nodes.train_reward_model,
            ["sft_policy", "preferences", "params:reward_modelling"],
            ["reward_model", "reward_model_metrics"],
        ),
    )
