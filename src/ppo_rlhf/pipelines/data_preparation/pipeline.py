"""The data preparation pipeline."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.data_preparation import nodes


def create_pipeline() -> Pipeline:
    """Wire `raw_demonstrations → split_demonstrations → demonstrations, evaluation_demonstrations`."""
    return Pipeline(
        [
            Node(
                nodes.split_demonstrations,
                {"raw_demonstrations": "raw_demonstrations", "data_preparation": "params:data_preparation"},
                {name: name for name in ("demonstrations", "evaluation_demonstrations")},
                name="split_demonstrations",
            )
        ],
        namespace="data_preparation",
        prefix_datasets_with_namespace=False,
    )
