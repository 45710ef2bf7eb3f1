"""Wiring of the pipeline `evaluation`."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.evaluation.nodes import (
    choose_prompts,
    compare_policies,
    evaluate_ppo_policy,
    evaluate_sft_policy,
    pair_samples,
    write_model_card,
)


def create_pipeline(**kwargs: object) -> Pipeline:
    """Return held-out prompts and both policies → their evaluations, the metrics eval/*, samples side by side."""
    shared = {
        "sft_policy": "sft_policy",
        "reward_model": "reward_model",
        "evaluation_prompts": "chosen_prompts",
        "ppo": "params:ppo",
        "reward": "params:reward",
        "evaluation": "params:evaluation",
    }
    prompts = ("evaluation_prompts", "raw_evaluation_prompts", "training_prompts")
    of_training = {name: name for name in ("trained_prompts", "training_history")}
    without_reward_model = {name: source for name, source in shared.items() if name != "reward_model"}
    evaluations = {
        "sft_evaluation": "sft_evaluation",
        "ppo_evaluation": "ppo_evaluation",
        "evaluation": "params:evaluation",
    }
    return Pipeline(
        [
            Node(
                choose_prompts,
                inputs={
                    **{name: name for name in (*prompts, "sft_policy")},
                    **{name: f"params:{name}" for name in ("ppo", "prompts")},
                },
                outputs=["chosen_prompts", "trained_prompts"],
                name="choose_prompts",
            ),
            Node(evaluate_sft_policy, inputs=shared, outputs="sft_evaluation", name="evaluate_sft_policy"),
            Node(
                evaluate_ppo_policy,
                inputs={"ppo_policy": "ppo_policy", **shared},
                outputs="ppo_evaluation",
                name="evaluate_ppo_policy",
            ),
            Node(
                compare_policies,
                inputs={**evaluations, **without_reward_model, **of_training},
                outputs={"evaluation_summary": "evaluation_summary", "before_after": "before_after"},
                name="compare_policies",
            ),
            Node(pair_samples, inputs=evaluations, outputs="sample_pairs", name="pair_samples"),
            Node(
                write_model_card,
                inputs={
                    **{name: source for name, source in shared.items() if name != "evaluation_prompts"},
                    "evaluation_summary": "evaluation_summary",
                    "before_after": "before_after",
                    "ppo_policy": "ppo_policy",
                },
                outputs="model_card",
                name="write_model_card",
            ),
        ],
        namespace="evaluation",
        prefix_datasets_with_namespace=False,
    )
