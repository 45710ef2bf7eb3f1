"""What the nodes of a run give MLflow: metrics, samples, models."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ppo_rlhf.checkpoints.store import saved_config, saved_history
from ppo_rlhf.datasets.checkpoints import read_evaluations
from ppo_rlhf.hooks.hyperparameters import parameter
from ppo_rlhf.hooks.metric_log import MetricLog
from ppo_rlhf.hooks.resumption import Resumption
from ppo_rlhf.hooks.sample_log import SampleLog
from ppo_rlhf.hooks.tracking_store import asked_twice
from ppo_rlhf.runner import CARRY_IN, CARRY_OUT, deferring_signals

ITERATION_METRICS = "ppo_metrics"
EVALUATION_METRICS = "evaluation_metrics"
FINAL_METRICS = "evaluation_summary"
HISTORIES = ("sft_metrics", "reward_model_metrics")
SAMPLED_NODE = "estimate_advantages"
POLICY = "ppo_policy"
CHECKPOINT = "checkpoint"
BEST = "best_checkpoint"
PATIENCE, PATIENCE_AT_THE_END = 5.0, 150.0
"""Seconds to wait for a tracking server that may not answer. What ends a run that was stopped may not take longer; the
last checkpoint holds the metrics, too. At the end of training longer than MLflow waits before it asks again (120)."""


class RunLog:
    """Logs what one run measures and makes. Of a run that goes on, only what MLflow lacks."""

    def __init__(
        self, run_id: str, pipeline: Pipeline, catalog: CatalogProtocol, resumption: Resumption | None = None
    ) -> None:
        """Log to the MLflow run with this id; complete it up to the checkpoint that it goes on from.

        Raises:
            MlflowException: What a resumed run has cannot be read.
        """
        is_continued = resumption is not None
        self._metrics = MetricLog(run_id, is_continued=is_continued)
        self._samples = SampleLog(run_id, is_continued=is_continued)
        self._catalog, self._outputs = catalog, pipeline.all_outputs()
        self._evaluated_at_end = FINAL_METRICS in self._outputs  # then not twice at the last iteration's step
        self._iteration = 0
        self._model_id: str | None = None
        self._histories_due = {name for name in HISTORIES if name in self._outputs and is_continued}
        self._former_end: int | None = None
        if resumption is not None and resumption.checkpoint is not None:
            self._complete(resumption.checkpoint)

    def node_ran(self, node: Node, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Log what a node measured."""
        self._follow(inputs, outputs)
        if outputs.get(ITERATION_METRICS):
            self._metrics.log(outputs[ITERATION_METRICS], self._iteration)
        if outputs.get(EVALUATION_METRICS) and not (self._evaluated_at_end and inputs[CARRY_OUT].finished):
            # where a run that was made longer ended before lies its final evaluation, of all prompts
            is_repeatable = self._iteration != self._former_end
            measured = _evaluations(outputs[EVALUATION_METRICS])
            self._metrics.log(measured, self._iteration, is_repeatable=is_repeatable)
        if outputs.get(FINAL_METRICS):
            self._metrics.log(_evaluations(outputs[FINAL_METRICS]), self._iteration, model_id=self._model_id)
        for name in HISTORIES:
            if outputs.get(name):
                self._metrics.log_history(outputs[name])
                # Before the stage counts as finished: a run that resumes leaves it out, and logs this when it is done.
                self._metrics.flush(PATIENCE)
                self._histories_due.discard(name)
        if node.name.rpartition(".")[2] == SAMPLED_NODE:
            self._log_samples(inputs)

    def saved(self, name: str) -> None:
        """Log the exported policy as a model, and the best checkpoint's if that is another one.

        No signal cuts through that, but one may cut the wait before it, which takes minutes where MLflow is silent.
        """
        if name != POLICY:
            return
        from ppo_rlhf.hooks.model_log import best_checkpoint, log_policy  # heavy: only runs that export pay for it

        # MLflow links a model with the metrics that the run has at the model's step
        is_answering = self._metrics.flush(PATIENCE_AT_THE_END)
        with deferring_signals(), nullcontext() if is_answering else asked_twice():
            handle = self._catalog[POLICY].load()
            trust = handle.trust_remote_code
            self._model_id = log_policy(Path(handle.source), POLICY, self._iteration, trust_remote_code=trust)
            best = best_checkpoint(self._catalog.get(CHECKPOINT), parameter(self._catalog, "ppo").kl_alarm)
            if best is not None and best[1] != self._iteration:
                log_policy(best[0], BEST, best[1], trust_remote_code=trust)

    def close(self, *, is_finished: bool) -> bool:
        """Wait a while for MLflow to take everything; of a finished run also the histories of stages left out.

        Returns:
            Whether it has everything. What it lacks is said.
        """
        end = time.monotonic() + (PATIENCE_AT_THE_END if is_finished else PATIENCE)
        if is_finished:
            for name in sorted(self._histories_due):
                if self._catalog[name].exists():
                    self._metrics.log_history(self._catalog[name].load())
        has_metrics, has_samples = (
            log.close(max(0.0, end - time.monotonic())) for log in (self._metrics, self._samples)
        )
        return has_metrics and has_samples

    def _complete(self, checkpoint: Path) -> None:
        """Log the metrics up to a checkpoint that MLflow lacks: what it refused when the run was interrupted."""
        rows = list(saved_history(checkpoint))
        last = int(rows[-1]["iteration"]) if rows else 0
        now = parameter(self._catalog, "ppo")
        before = dataclasses.replace(now, total_episodes=saved_config(checkpoint)["total_episodes"])
        if now.num_total_batches > before.num_total_batches == last:
            self._former_end = last
        evaluations = [
            {"iteration": row["iteration"], **_evaluations(row)}
            for row in read_evaluations(checkpoint.parent)
            if row["iteration"] <= last and not (self._evaluated_at_end and row["iteration"] >= now.num_total_batches)
        ]
        self._metrics.complete([*rows, *evaluations])

    def _follow(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Keep count of the iteration that a node belongs to."""
        if CARRY_IN in inputs and CARRY_OUT not in outputs:
            self._iteration = inputs[CARRY_IN].iteration + 1
            return
        for name, values in ((CARRY_OUT, outputs), (CARRY_OUT, inputs), (CARRY_IN, outputs)):
            if name in values:
                self._iteration = values[name].iteration
                return

    def _log_samples(self, inputs: Mapping[str, Any]) -> None:
        interval = inputs["ppo_config"].sample_interval
        if self._iteration != 1 and self._iteration % interval:
            return
        from ppo_rlhf.ppo.experience import sample_table  # heavy: only runs that train pay for it

        self._samples.log(self._iteration, sample_table(inputs["rollouts"], inputs["scores"], inputs["shaped_rewards"]))


def _evaluations(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among what an evaluation gives, which also says of which iteration, prompts and judge."""
    return {key: value for key, value in measured.items() if key.startswith("eval/")}
