"""Wiring of the pipeline `collect_feedback`."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.collect_feedback import nodes
from ppo_rlhf.pipelines.wiring import named, stage


def create_pipeline() -> Pipeline:
    """Return the pipeline policies and prompts → pairs of responses with random sides → a review queue in MLflow.

    The pipeline writes the table of pairs, with the side of each response, before it adds the first pair to MLflow.
    """
    sampled = ["sft_policy", "ppo_policy", "raw_prompts", "raw_evaluation_prompts"]
    return stage(
        "collect_feedback",
        named(nodes.find_queued_pairs, ["collected_pairs", "params:feedback"], "queued_pairs"),
        named(
            nodes.sample_pairs,
            ["queued_pairs", *sampled, "params:ppo", "params:prompts", "params:feedback"],
            "feedback_pairs",
        ),
        named(
            nodes.queue_pairs,
            ["feedback_pairs", "queued_pairs", "params:feedback"],
            ["feedback_queue", "feedback_sheet"],
        ),
    )
