"""The supervised fine-tuning pipeline."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.stages import named, stage
from ppo_rlhf.pipelines.supervised_finetuning import nodes


def create_pipeline() -> Pipeline:
    """Wire `base_model, demonstrations, evaluation_demonstrations → train_sft_policy → sft_policy, sft_metrics`."""
    train = named(
        nodes.train_sft_policy,
        ["base_model", "demonstrations", "evaluation_demonstrations", "params:supervised_finetuning"],
        ["sft_policy", "sft_metrics"],
    )
    return stage("supervised_finetuning", train)
