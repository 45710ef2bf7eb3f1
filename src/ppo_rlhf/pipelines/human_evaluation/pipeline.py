"""Wiring of the pipeline `human_evaluation`."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.human_evaluation import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Return the pipeline people's answers → win rate by people → model card of the policy."""
    return stage(
        "human_evaluation",
        named(nodes.unblind_answers, ["collected_pairs", "params:feedback"], "answered_comparisons"),
        named(nodes.compare_by_people, ["answered_comparisons", "params:evaluation"], "human_evaluation"),
        named(nodes.write_people_card, ["human_evaluation", "ppo_policy"], "human_model_card"),
    )
