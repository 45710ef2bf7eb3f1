"""Wiring of the pipeline `evaluation`."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.evaluation import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Return the pipeline held-out prompts and both policies → evaluations → metrics eval/*, samples, model card."""
    prompts = ["evaluation_prompts", "raw_evaluation_prompts", "training_prompts"]
    models, evaluations = ["sft_policy", "reward_model"], ["sft_evaluation", "ppo_evaluation"]
    settings = ["params:ppo", "params:reward", "params:evaluation"]
    return stage(
        "evaluation",
        named(
            nodes.choose_prompts,
            [*prompts, "sft_policy", "params:ppo", "params:prompts"],
            ["chosen_prompts", "trained_prompts"],
        ),
        named(nodes.evaluate_sft_policy, [*models, "chosen_prompts", *settings], "sft_evaluation"),
        named(
            nodes.evaluate_ppo_policy,
            ["ppo_policy", *models, "chosen_prompts", "sft_evaluation", *settings],
            "ppo_evaluation",
        ),
        named(
            nodes.measure_reference_texts,
            [
                *("raw_reference_texts", "evaluation_demonstrations", "ppo_policy", "sft_policy"),
                *("params:ppo", "params:data_preparation", "params:evaluation"),
            ],
            "reference_losses",
        ),
        named(
            nodes.compare_policies,
            [
                *evaluations,
                "reference_losses",
                "sft_policy",
                "chosen_prompts",
                "evaluation_prompts",
                "trained_prompts",
                "training_history",
                *settings,
            ],
            {"evaluation_summary": "evaluation_summary", "before_after": "before_after"},
        ),
        named(nodes.pair_samples, [*evaluations, "chosen_prompts", "params:evaluation"], "sample_pairs"),
        named(
            nodes.write_model_card,
            ["evaluation_summary", "before_after", "ppo_policy", *models, *settings],
            "model_card",
        ),
    )
