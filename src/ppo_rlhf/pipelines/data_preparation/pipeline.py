"""The data preparation pipeline."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.data_preparation import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Wire `raw_demonstrations, base_model → split_demonstrations → demonstrations, evaluation_demonstrations`."""
    split = named(
        nodes.split_demonstrations,
        ["raw_demonstrations", "base_model", "params:data_preparation"],
        ["demonstrations", "evaluation_demonstrations"],
    )
    return stage("data_preparation", split)
