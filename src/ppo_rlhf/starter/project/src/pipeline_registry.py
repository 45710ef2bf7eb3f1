"""The pipelines that `kedro run` knows: the pipelines of ppo_rlhf, and your own."""

from kedro.pipeline import Pipeline

from ppo_rlhf import pipeline_registry


def register_pipelines() -> dict[str, Pipeline]:
    """Return the pipelines by name."""
    pipelines = pipeline_registry.register_pipelines()
    # Add your own nodes here. Nodes read and write datasets of the catalogs in conf/base, to which you can add entries:
    # pipelines["align"] += Pipeline([Node(publish, "evaluation_summary", "announcement")])
    # Add a pipeline of your own by pipelines["mine"] = Pipeline([…]).
    # Do not use Kedro's find_pipelines: with `--pipelines align` it looks only for a folder named align.

    # `kedro run` starts from your SFT model. By default it would first train an SFT model and a reward model.
    pipelines["__default__"] = pipelines["align"]
    return pipelines
