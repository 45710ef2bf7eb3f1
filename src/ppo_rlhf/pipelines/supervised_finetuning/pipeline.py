"""The supervised fine-tuning pipeline."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.supervised_finetuning import nodes


def create_pipeline() -> Pipeline:
    """Wire `base_model, demonstrations, evaluation_demonstrations → train_sft_policy → sft_policy, sft_metrics`."""
    inputs = ("base_model", "demonstrations", "evaluation_demonstrations")
    return Pipeline(
        [
            Node(
                nodes.train_sft_policy,
                {**{name: name for name in inputs}, "supervised_finetuning": "params:supervised_finetuning"},
                {name: name for name in ("sft_policy", "sft_metrics")},
                name="train_sft_policy",
            )
        ],
        namespace="supervised_finetuning",
        prefix_datasets_with_namespace=False,
    )
