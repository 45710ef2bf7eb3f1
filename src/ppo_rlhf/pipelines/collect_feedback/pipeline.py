"""Wiring of the pipeline `collect_feedback`."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.collect_feedback import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Return the pipeline policies and prompts → pairs of responses with random sides → a review queue in MLflow.

    The files of the pairs, and the table of the sides, are written before the first pair is put into MLflow.
    """
    sampled = ["sft_policy", "ppo_policy", "raw_prompts", "raw_evaluation_prompts"]
    return stage(
        "collect_feedback",
        named(
            nodes.sample_pairs,
            ["collected_pairs", *sampled, "params:ppo", "params:prompts", "params:feedback"],
            "feedback_pairs",
        ),
        named(nodes.put_pairs, ["feedback_pairs", "params:feedback"], None),
    )
