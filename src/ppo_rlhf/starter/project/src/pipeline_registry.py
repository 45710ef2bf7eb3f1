"""The pipelines that `kedro run` knows: those of ppo_rlhf, and yours."""

from kedro.pipeline import Pipeline

from ppo_rlhf import pipeline_registry


def register_pipelines() -> dict[str, Pipeline]:
    """Return the pipelines by name."""
    pipelines = pipeline_registry.register_pipelines()
    # Own nodes go here. They read and write datasets of conf/base, or new ones with entries of their own there:
    # pipelines["align"] += Pipeline([Node(publish, "evaluation_summary", "announcement")])
    # A pipeline of its own: pipelines["mine"] = Pipeline([…]). Kedro's find_pipelines is of no use here: with
    # `--pipelines align` it looks for a folder of that name alone.

    # `kedro run` starts from your SFT model. Without this line it trains that model and a reward model first.
    pipelines["__default__"] = pipelines["align"]
    return pipelines
