"""The reward modelling pipeline."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.reward_modelling import nodes
from ppo_rlhf.pipelines.wiring import named


def create_pipeline() -> Pipeline:
    """Wire preferences and reward model.

    ```
    raw_preferences → check_preferences → checked_preferences (empty if none are given)
    checked_preferences, sft_policy, raw_prompts → collect_preferences → preferences
    sft_policy, preferences → train_reward_model → reward_model, reward_model_metrics
    ```
    """
    sampled = ["sft_policy", "raw_prompts", "raw_evaluation_prompts"]
    own = [
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
    ]
    return Pipeline(own, namespace="reward_modelling", prefix_datasets_with_namespace=False)
