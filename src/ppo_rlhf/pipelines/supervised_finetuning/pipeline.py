"""The supervised fine-tuning pipeline."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.supervised_finetuning import nodes


def create_pipeline() -> Pipeline:
    """Wire `base_model, demonstrations, evaluation_demonstrations → train_sft_policy → sft_policy, sft_metrics`."""
    train = Node(
        nodes.train_sft_policy,
        ["base_model", "demonstrations", "evaluation_demonstrations", "params:supervised_finetuning"],
        ["sft_policy", "sft_metrics"],
        name="train_sft_policy",
    )
    return Pipeline([train], namespace="supervised_finetuning", prefix_datasets_with_namespace=False)
