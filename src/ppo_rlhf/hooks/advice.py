"""At the end of a run that trained: the settings to change first, in the log."""

from __future__ import annotations

import logging
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ppo_rlhf.hooks.run_description import parameter
from ppo_rlhf.runner import RunInterruptedError

logger = logging.getLogger(__name__)

NEXT_STATE = "next_training_state"
METRICS = ("ppo_metrics", "evaluation_metrics")
WHOLE_HISTORY = "training_history"
"""The curves from the first iteration on, also of a run that went on from a checkpoint."""


class AdviceHook:
    """Collects a run's curves, and logs at its end the advice of the tuning guide's rules.

    A run that failed gets it too: its curves may show the reason. A run that a person stopped does not.
    """

    def __init__(self) -> None:
        """Start without curves."""
        self._rows: dict[int, dict[str, float]] = {}
        self._iteration = 0

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Forget the run before, in a session that has several."""
        self._rows = {}

    @hook_impl
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> None:
        """Keep the metrics of an iteration."""
        if NEXT_STATE in outputs:
            self._iteration = outputs[NEXT_STATE].iteration
        for name in METRICS:
            if outputs.get(name):
                self._rows.setdefault(self._iteration, {}).update(outputs[name])
        if WHOLE_HISTORY in outputs:
            self._rows = {int(row["iteration"]): row for row in outputs[WHOLE_HISTORY].to_dict("records")}

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Log the advice."""
        self._advise(catalog)

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Log the advice on the curves so far, unless a person stopped the run."""
        if not isinstance(error, RunInterruptedError):
            self._advise(catalog)

    def _advise(self, catalog: CatalogProtocol) -> None:
        rows, self._rows = [{**row, "iteration": at} for at, row in self._rows.items()], {}
        if not rows:
            return
        from ppo_rlhf.training.tuning import advise, in_words  # heavy: only a run that trained pays for it

        config = parameter(catalog, "ppo")
        advice = advise(config, rows)
        for line in ["What to change first (`kedro advise` says it again):", *in_words(config, advice, rows)]:
            logger.info("%s", line)
