"""The reward modelling pipeline."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.reward_modelling import nodes


def create_pipeline() -> Pipeline:
    """Wire preferences and reward model.

    ```
    raw_preferences → check_preferences → checked_preferences (empty if none are given)
    checked_preferences, sft_policy, raw_prompts → collect_preferences → preferences
    sft_policy, preferences → train_reward_model → reward_model, reward_model_metrics
    ```
    """
    prompts = ("raw_prompts", "raw_evaluation_prompts")
    return Pipeline(
        [
            Node(
                nodes.check_preferences,
                {"raw_preferences": "raw_preferences", "reward_modelling": "params:reward_modelling"},
                "checked_preferences",
                name="check_preferences",
            ),
            Node(
                nodes.collect_preferences,
                {
                    **{name: name for name in ("checked_preferences", "sft_policy", *prompts)},
                    **{name: f"params:{name}" for name in ("reward_modelling", "ppo", "prompts")},
                },
                "preferences",
                name="collect_preferences",
            ),
            Node(
                nodes.train_reward_model,
                {
                    **{name: name for name in ("sft_policy", "preferences")},
                    "reward_modelling": "params:reward_modelling",
                },
                {name: name for name in ("reward_model", "reward_model_metrics")},
                name="train_reward_model",
            ),
        ],
        namespace="reward_modelling",
        prefix_datasets_with_namespace=False,
    )
