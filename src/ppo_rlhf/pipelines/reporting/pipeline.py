"""Wiring of the pipeline `reporting`."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.reporting.nodes import plot_scores, plot_training, print_summary, write_report

_REPORTED = {
    "evaluation_summary": "evaluation_summary",
    "before_after": "before_after",
    "ppo_policy": "ppo_policy",
    "reward_model": "reward_model",
    "reward": "params:reward",
    "reporting": "params:reporting",
}


def create_pipeline(**kwargs: object) -> Pipeline:
    """Return training history and evaluation → plots, the report page, the result in the terminal."""
    return Pipeline(
        [
            Node(
                plot_training,
                inputs={"training_history": "training_history", "ppo": "params:ppo", "reporting": "params:reporting"},
                outputs="training_curves_plot",
                name="plot_training",
            ),
            Node(
                plot_scores,
                inputs={"sft_evaluation": "sft_evaluation", "ppo_evaluation": "ppo_evaluation"},
                outputs="score_distribution_plot",
                name="plot_scores",
            ),
            Node(
                write_report,
                inputs={
                    **_REPORTED,
                    "training_history": "training_history",
                    "sample_pairs": "sample_pairs",
                    "sft_evaluation": "sft_evaluation",
                    "ppo_evaluation": "ppo_evaluation",
                    "token_samples": "token_samples",
                    "sft_policy": "sft_policy",
                    "ppo": "params:ppo",
                    "evaluation": "params:evaluation",
                },
                outputs="report",
                name="write_report",
            ),
            Node(print_summary, inputs={"report": "report", **_REPORTED}, outputs=None, name="print_summary"),
        ],
        namespace="reporting",
        prefix_datasets_with_namespace=False,
    )
