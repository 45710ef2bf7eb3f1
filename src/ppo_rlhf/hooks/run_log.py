"""Logs the metrics, samples and models that a run's nodes produce to MLflow."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlflow
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.datasets.tracking_errors import short_timeouts
from ppo_rlhf.hooks.mlflow_log import MlflowLog
from ppo_rlhf.hooks.run_description import parameter, verdict_of
from ppo_rlhf.hooks.tracking_store import UPLOAD_S, log_store_errors, name_slow_store
from ppo_rlhf.judge.llm_judge import judge_counts, judges_in_words
from ppo_rlhf.models.origins import MADE_FROM
from ppo_rlhf.runtime import progress_display
from ppo_rlhf.runtime.names import (
    CHECKPOINT,
    CRITIC,
    EVALUATION_METRICS,
    EXPORTED,
    ITERATION_METRICS,
    NEXT_STATE,
    POLICY,
    STATE,
    env_option,
)
from ppo_rlhf.runtime.paths import last_name, path_of
from ppo_rlhf.runtime.signals import deferring_signals

logger = logging.getLogger(__name__)

SINCE_BEST = "eval/since_best_"  # prefix of metrics that only evaluations during training log, not the final evaluation
FINAL_METRICS = "evaluation_summary"
HISTORIES = ("sft_metrics", "reward_model_metrics", "critic_metrics")
SAMPLES = 20
"""Number of completions of each iteration that are logged to the table of samples."""
SAMPLED = {"prompt": "prompt", "response": "completion", "score": "score", "kl": "kl", "stopped": "stopped"}
"""The columns of the table of samples, each with the name of a completion's field that the column contains."""
AT_A_GLANCE = {
    "eval/win_rate": "at_a_glance/win_rate",
    "eval/reward": "at_a_glance/reward",
    "eval/kl": "at_a_glance/kl",
    "objective/scores": "at_a_glance/reward_training",
    "objective/kl": "at_a_glance/kl_training",
}
"""Metrics that are logged under a second key, rounded to three digits: MLflow sorts charts by metric key, cuts the ends
of their titles, and has no setting for the order of charts or the number of digits in its tables."""
HEADLINES = ("eval/judge_score_se", "eval/reward_se", "eval/kl_se")
"""The standard errors that are metrics; those of other means are one tag, since each metric is one more chart."""
STANDARD_ERRORS = "standard_errors"
"""The tag with the standard errors of the final evaluation that are no metrics, each after the key of its mean."""
WRITTEN = "written."
"""The prefix of the tags that hold the path of each model that the run wrote."""
BEST = "best_checkpoint"
ERROR, OF_SFT = "_se", "_sft"  # suffixes of metric keys: standard errors, and values of the SFT policy
PATIENCE, PATIENCE_AT_THE_END = 5.0, 30.0
"""Seconds to wait for a tracking server that may not answer, for a stopped and for a finished run. A stopped run waits
less, because the resumed run can send the metrics that the last checkpoint holds."""


class RunLog:
    """Logs the metrics, samples and models of one run; a resumed run sends only metrics that MLflow does not have."""

    def __init__(
        self,
        run_id: str,
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        *,
        is_resumed: bool = False,
        checkpoints: Path | None = None,
    ) -> None:
        self._log = MlflowLog(run_id, is_continued=is_resumed, checkpoints=checkpoints)
        self._catalog, self._outputs, self._is_resumed = catalog, pipeline.all_outputs(), is_resumed
        self._iteration = self._policy_iteration = 0
        self._model_id: str | None = None
        self._curves: dict[int, dict[str, float]] = {}
        progress_display.listeners[:] = [self._log.log]

    def repeat(self, beginnings: tuple[str, ...]) -> None:
        """Log metrics with the given key prefixes again, even for steps that MLflow has, because a resumed run repeats
        steps.
        """
        self._log.repeated = beginnings

    def node_ran(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Log the metrics and samples among the outputs of a node that has run."""
        for state in (inputs.get(NEXT_STATE), outputs.get(STATE), outputs.get(NEXT_STATE)):
            if state is not None:
                self._iteration, self._policy_iteration = state.progress.iteration, state.progress.policy_iteration
        if self._is_resumed and STATE in outputs:
            self._send_history(outputs[STATE])
        if outputs.get(ITERATION_METRICS):
            self._curves[self._iteration] = {}
            self._measured(outputs[ITERATION_METRICS], self._iteration)
        is_superseded = EVALUATION_METRICS in outputs and self._is_superseded(inputs[NEXT_STATE])
        if outputs.get(EVALUATION_METRICS):
            row = outputs[EVALUATION_METRICS]
            measured = _evaluations(row, SINCE_BEST if is_superseded and EXPORTED not in row else "eval/")
            # `_conclude` logs the last values of a run that evaluates its policy. The run ends after an evaluation that
            # stops it, so only a resumed run, which repeats the evaluation, has a finished state here
            is_last = FINAL_METRICS not in self._outputs and (EXPORTED in row or inputs[NEXT_STATE].progress.finished)
            self._measured(measured, self._iteration, is_last=is_last)
        # The evaluation is the last node of an iteration that calls judges, so log the counts of the judges' calls
        # here. `close` logs the counts of the judges' calls in the final evaluation.
        if EVALUATION_METRICS in outputs and not is_superseded:
            self._log.log(judge_counts(), self._iteration)
        if outputs.get(FINAL_METRICS):
            self._conclude(outputs[FINAL_METRICS])
        self._log.log((outputs.get("reward_audit") or {}).get("metrics", {}), 0)
        for name in HISTORIES:
            self._send_rows(outputs.get(name) or [])
        if rows := outputs.get("completions", [])[:SAMPLES]:
            from ppo_rlhf.data.readable_prompts import readable_prompt

            columns = {column: [row[name] for row in rows] for column, name in SAMPLED.items()}
            columns["prompt"] = [
                readable_prompt(row["prompt"], row.get("prompt_chat"), row.get("tools")) for row in rows
            ]
            self._log.log_samples(rows[0]["iteration"], columns)
        if samples := outputs.get("token_samples"):
            from ppo_rlhf.reporting.token_view import render_page

            self._log.log_page(render_page([samples]), f"token_view/iteration_{samples['iteration']:06d}.html")

    def saved(self, name: str) -> None:
        """Log the path of a written model. Log the exported policy and critic as MLflow models as well.

        The policy of the best checkpoint is logged, too, if it is not the exported policy. A signal may interrupt the
        wait for the metrics, but not the logging of a model.
        """
        uri = mlflow.get_tracking_uri()
        with name_slow_store(uri):
            if (version := getattr(self._catalog.get(name), "pinned", None)) is not None:
                with log_store_errors(f"the path of {name}"):
                    mlflow.set_tag(f"{WRITTEN}{name}.{version.name}".replace("+", "_"), str(version))
                    if (version / MADE_FROM).is_file():
                        mlflow.log_artifact(str(version / MADE_FROM), name)
            if name != POLICY and not (name == CRITIC and version is not None):
                return
            # MLflow links a logged model only with metrics that the MLflow run has, so send the metrics first
            has_metrics = self._log.flush(PATIENCE_AT_THE_END)
        from ppo_rlhf.hooks.model_log import best_checkpoint, log_critic, log_policy

        patience = nullcontext() if has_metrics else short_timeouts()
        with name_slow_store(uri, UPLOAD_S), deferring_signals(), patience:
            if name == CRITIC and version is not None:
                step = self._policy_iteration
                log_critic(version, CRITIC, step, self._curves.get(step, {}))
                return
            handle = self._catalog[POLICY].load()
            config = parameter(self._catalog, "ppo")

            def log(directory: Path, name: str, step: int) -> str:
                return log_policy(
                    directory,
                    name,
                    step,
                    keys=self._curves.get(step, {}),
                    config=config,
                    generation_config=handle.generation_config(),
                    trust_remote_code=handle.trust_remote_code,
                )

            self._model_id = log(Path(handle.source), POLICY, self._policy_iteration)
            try:
                best = best_checkpoint(self._catalog.get(CHECKPOINT), config.kl_alarm)
            except CheckpointError as error:  # the exported policy is whole, so the run ends as it should
                logger.warning("MLflow gets no model %s: %s", BEST, error)
            else:
                if best is not None and best[1] != self._policy_iteration:
                    log(best[0], BEST, best[1])

    def close(self, *, is_finished: bool) -> bool:
        """Flush. For a finished run that was resumed, also log the curves of stages that the resumed run skipped.

        Return whether MLflow has everything.
        """
        progress_display.listeners.clear()
        self._log.log(judge_counts(), self._iteration)
        for line in judges_in_words():
            logger.info("%s", line)
        for name in HISTORIES if is_finished and self._is_resumed else ():
            if name in self._outputs and self._catalog[name].exists():
                self._send_rows(self._catalog[name].load())
        return self._log.close(PATIENCE_AT_THE_END if is_finished else PATIENCE)

    def log_advice(self, environment: str | None = None) -> None:
        """Log which settings to change first, by the rules of docs/tuning.md; log nothing without metrics."""
        if not self._curves:
            return
        from ppo_rlhf.advice import in_words

        config = parameter(self._catalog, "ppo")
        history = [{**row, "iteration": float(iteration)} for iteration, row in sorted(self._curves.items())]
        command = f"kedro advise{env_option(environment)}"
        for line in [f"What to change first (`{command}` says it again):", *in_words(config, history, command=command)]:
            logger.info("%s", line)

    def _send_history(self, state: Any) -> None:
        """Log the metrics up to the checkpoint's iteration, because MLflow may have refused metrics before the
        interruption.
        """
        for row in state.progress.history:
            self._curves[int(row["iteration"])] = {}
            self._measured(row, int(row["iteration"]))
        entry = self._catalog.get(EVALUATION_METRICS)
        if entry is None or not entry.exists() or EVALUATION_METRICS not in self._outputs:
            return
        last = state.progress.iteration - 1 if self._is_superseded(state) else state.progress.iteration
        for row in entry.load():
            if row["iteration"] <= last:
                self._measured(_evaluations(row), int(row["iteration"]))

    def _measured(
        self, metrics: Mapping[str, float], iteration: int, *, model_id: str | None = None, is_last: bool = False
    ) -> None:
        """Log the metrics of an iteration except standard errors of evaluations.

        The SFT policy's evaluation metrics are constant, so they are logged only once, at the last iteration.
        """
        glance = {AT_A_GLANCE[key]: float(f"{x:.3g}") for key, x in metrics.items() if key in AT_A_GLANCE}
        metrics = {**metrics, **glance}
        omitted = (ERROR,) if is_last else (ERROR, OF_SFT)
        charts = {key: x for key, x in metrics.items() if not (key.startswith("eval/") and key.endswith(omitted))}
        self._log.log(charts, iteration, model_id=model_id)
        if iteration in self._curves:
            self._curves[iteration].update(metrics)

    def _conclude(self, summary: Mapping[str, Any]) -> None:
        """Log the final evaluation, put the verdict into the run's description, register the model.

        If the exported policy is not that of the last iteration, the step is the next one: the last iteration has an
        evaluation of its own.
        """
        step = self._iteration + (self._policy_iteration != self._iteration)
        self._measured(_evaluations(summary), step, model_id=self._model_id, is_last=True)
        self._log.log({name: summary[name] for name in HEADLINES if name in summary}, step)
        others = {name: x for name, x in summary.items() if name.endswith(ERROR) and name not in HEADLINES}
        errors = ", ".join(f"{name.removesuffix(ERROR)} {x:.3g}" for name, x in others.items())[:MAX_TAG_VAL_LENGTH]
        note = verdict_of(summary)
        if POLICY not in self._outputs:
            policy = self._catalog[POLICY].load()
            trained = re.search(r"MLflow run: `(\w+)`", policy.card() or "")
            note += f" Policy: {policy.source}" + (f" of run [{trained[1]}](#/runs/{trained[1]})" if trained else "")
        with log_store_errors("the verdict"):
            mlflow.set_tags({MLFLOW_RUN_NOTE: note, **({STANDARD_ERRORS: errors} if errors else {})})
        if self._model_id is not None:
            from ppo_rlhf.hooks.model_log import register

            with deferring_signals(), log_store_errors("the registered model"):
                register(self._model_id, last_name(path_of(self._catalog.get("sft_policy")) or "model"), summary)

    def _is_superseded(self, state: Any) -> bool:
        """Return whether the evaluation pipeline will evaluate the policy of `state` again, on all held-out prompts.

        If the result is True, only the later evaluation is logged for the iteration, so that the curve does not get two
        points for one iteration.
        """
        return bool(
            FINAL_METRICS in self._outputs and state.progress.finished and not state.progress.requests.restore_best
        )

    def _send_rows(self, rows: list[Mapping[str, float]]) -> None:
        for row in rows:
            # MlflowLog drops rows of metrics that an earlier call of the stage has already logged
            self._log.log(row, int(row["step"]))


def _evaluations(measured: Mapping[str, Any], beginning: str = "eval/") -> dict[str, float]:
    """Return the metrics of an evaluation, without the iteration, the prompts and the judge that it also names."""
    return {key: value for key, value in measured.items() if key.startswith(beginning)}
