"""Wiring of the pipeline `reporting`."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.reporting import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Return the pipeline training history and evaluation → plots, report page, result in the terminal."""
    evaluations, result = ["sft_evaluation", "ppo_evaluation"], ["evaluation_summary", "before_after"]
    samples, models = ["sample_pairs", "token_samples"], ["ppo_policy", "sft_policy", "reward_model"]
    settings = ["params:ppo", "params:reward", "params:evaluation", "params:reporting"]
    return stage(
        "reporting",
        named(
            nodes.plot_training,
            ["training_history", "ppo_policy", "params:ppo", "params:reporting"],
            "training_curves_plot",
        ),
        named(nodes.plot_scores, evaluations, "score_distribution_plot"),
        named(
            nodes.write_report,
            [
                "training_history",
                *result,
                *samples,
                *evaluations,
                "human_evaluation",
                "audited_holes",
                *models,
                *settings,
            ],
            "report",
        ),
        named(
            nodes.print_summary,
            ["report", *result, "audited_holes", "ppo_policy", "reward_model", "params:reward", "params:reporting"],
            None,
        ),
    )
