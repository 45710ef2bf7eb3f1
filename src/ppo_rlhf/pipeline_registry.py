"""The pipelines that `kedro run --pipelines` knows."""

from importlib import import_module
from typing import Any

from kedro.pipeline import Pipeline

STAGES = ("data_preparation", "supervised_finetuning", "reward_modelling", "ppo", "evaluation", "reporting")
ALIGN = ("ppo", "evaluation", "reporting")


class DeferredPipeline(Pipeline):
    """The sum of some stages, imported and put together when a node, dataset or parameter of it is first asked for.

    The names are then known without torch and transformers, which the nodes' signatures need for their types (Kedro
    validates parameters by them): `kedro registry list` takes half as long, and `--pipelines align` imports no stage
    that it doesn't run.
    """

    def __init__(self, *stages: str) -> None:
        """Note the names of the stages, each a package in `ppo_rlhf.pipelines`."""
        self._stages = stages

    def __getattr__(self, attribute: str) -> Any:
        """Put the pipeline together: Python asks here for what `Pipeline.__init__` has not set yet."""
        if "_stages" not in self.__dict__ or "_nodes_by_name" in self.__dict__ or attribute.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        try:
            modules = [import_module(f"ppo_rlhf.pipelines.{stage}") for stage in self._stages]
            whole = Pipeline([module.create_pipeline() for module in modules])
        except AttributeError as error:  # Kedro would take it for a pipeline without nodes
            raise RuntimeError(f"The stages {', '.join(self._stages)} cannot be put together: {error}") from error
        self.__dict__.update(vars(whole))  # at once: what failed stays undone, and other threads see all or nothing
        return getattr(self, attribute)


def register_pipelines() -> dict[str, Pipeline]:
    """Return each stage, `align` (for models of one's own) and `__default__`, the whole chain.

    Kedro's `find_pipelines` is not used: with `--pipelines align` it looks for a folder of that name, and fails.
    """
    stages = {stage: DeferredPipeline(stage) for stage in STAGES}
    return {**stages, "align": DeferredPipeline(*ALIGN), "__default__": DeferredPipeline(*STAGES)}
