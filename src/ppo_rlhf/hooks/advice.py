"""At the end of a run that trained: what to change first, in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ppo_rlhf.hooks.hyperparameters import parameter
from ppo_rlhf.runner import CARRY_OUT, RunInterruptedError

logger = logging.getLogger(__name__)

ITERATION_METRICS = "ppo_metrics"
EVALUATION_METRICS = "evaluation_metrics"
WHOLE_HISTORY = "training_history"
"""The curves from the first iteration on, also of a run that went on from a checkpoint."""


class AdviceHook:
    """Gathers a run's curves and says at its end what the rules of the tuning guide make of them.

    Also at the end of a run that failed: what it measured may say why. A run that a person interrupted ends silently.
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
        """Take in what an iteration measured."""
        if CARRY_OUT in outputs:
            self._iteration = outputs[CARRY_OUT].iteration
        for name in (ITERATION_METRICS, EVALUATION_METRICS):
            if outputs.get(name):
                self._rows.setdefault(self._iteration, {}).update(outputs[name])
        if WHOLE_HISTORY in outputs:
            rows = outputs[WHOLE_HISTORY].to_dict("records")
            self._rows = {int(row["iteration"]): row for row in rows}

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Give the advice."""
        self._advise(catalog)

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Give the advice on what there is, unless a person stopped the run."""
        if not isinstance(error, RunInterruptedError):
            self._advise(catalog)

    def _advise(self, catalog: CatalogProtocol) -> None:
        rows, self._rows = self._rows, {}
        if rows:
            for line in _lines(parameter(catalog, "ppo"), [{**row, "iteration": at} for at, row in rows.items()]):
                logger.info("%s", line)


def _lines(config: Any, rows: Iterable[Mapping[str, float]]) -> list[str]:
    from ppo_rlhf.training.tuning import CURVE_RULES, advise, in_words  # heavy: only a run that trained pays for it

    history = list(rows)
    advice = advise(config, history, CURVE_RULES)  # what settings alone say was said when the run began
    return ["What to change first (`kedro advise` says it again):", *in_words(config, advice, history)]
