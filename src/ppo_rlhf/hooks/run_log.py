"""Logs the metrics, samples and models that a run's nodes produce to MLflow."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from ppo_rlhf.checkpoints.evaluations import COMPLETIONS, write_completions
from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name
from ppo_rlhf.checkpoints.store import mark_of
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.datasets.tracking_errors import short_timeouts
from ppo_rlhf.hooks.mlflow_mirror import MODEL_ID, MlflowMirror, log_table
from ppo_rlhf.hooks.run_description import parameter, verdict_of
from ppo_rlhf.hooks.tracking_store import UPLOAD_S, log_store_errors, name_slow_store
from ppo_rlhf.judge.llm_judge import judge_counts, judges_in_words
from ppo_rlhf.models.origins import MADE_FROM
from ppo_rlhf.runtime import progress_display
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, Line, metrics_of, read_lines
from ppo_rlhf.runtime.names import (
    CHECKPOINT,
    CRITIC,
    EVALUATION_METRICS,
    EXPORTED,
    IS_LAST,
    ITERATION_METRICS,
    NEXT_STATE,
    POLICY,
    STATE,
    env_option,
)
from ppo_rlhf.runtime.paths import last_name, path_of, readable_path
from ppo_rlhf.runtime.signals import deferring_signals

logger = logging.getLogger(__name__)

SINCE_BEST = "eval/since_best_"  # prefix of metrics that only evaluations during training log, not the final evaluation
FINAL_METRICS = "evaluation_summary"
HISTORIES = ("sft_metrics", "reward_model_metrics", "critic_metrics")
FINAL, JUDGES, AUDIT = "final_evaluation", "judges", "audit"
"""Kinds of lines in metrics.jsonl, beside the loop's and the stages': the final evaluation, the counts of the judges'
calls, the audit of the reward."""
NOT_METRICS = ("iteration", MODEL_ID)
ITERATIONS_PER_TABLE = 50
"""Sampled iterations in one table of samples: a table is written anew for each of its iterations."""
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
    """Logs the metrics, samples and models of one run.

    Metrics are lines of the run's metrics.jsonl, which `MlflowMirror` sends. The nodes of PPO's loop write theirs; this
    class writes those of the other stages.
    """

    def __init__(
        self,
        run_id: str,
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        *,
        folder: Path | None = None,
        can_resume: bool = False,
    ) -> None:
        """Log to the MLflow run `run_id`; `folder` is the run's folder, or None if the project has none for runs."""
        self._catalog, self._outputs, self._can_resume = catalog, pipeline.all_outputs(), can_resume
        self._temporary = TemporaryDirectory() if folder is None else None
        self._folder = folder or Path(self._temporary.name)  # type: ignore[union-attr]
        self._metrics = metrics_of(self._folder)
        self._mirror = MlflowMirror(run_id, self._folder, self._charts, self._send_samples)
        self._run_id, self._iteration, self._policy_iteration = run_id, 0, 0
        self._model_id: str | None = None
        self._rows: list[dict[str, Any]] = []  # metrics of each iteration, known at the end
        self._stages: set[tuple[str, int]] = set()  # keys and steps of the stages' metrics that are written
        progress_display.listeners[:] = [self._write_step]

    def go_on(self, checkpoint: Path | None, anew: tuple[str, ...]) -> None:
        """Prepare for a resumed run, before metrics.jsonl is cut; `anew` are the stages whose metrics are sent again.

        Raises:
            CheckpointError: metrics.jsonl is damaged.
        """
        self._mirror.cut(mark_of(checkpoint, self._folder), anew)

    def node_ran(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Record the metrics and samples among the outputs of a node that has run."""
        for state in (inputs.get(NEXT_STATE), outputs.get(STATE), outputs.get(NEXT_STATE)):
            if state is not None:
                self._iteration, self._policy_iteration = state.progress.iteration, state.progress.policy_iteration
        # The evaluation is the last node of an iteration that calls judges, so the counts of the judges' calls are
        # written here. `close` writes the counts of the final evaluation.
        if EVALUATION_METRICS in outputs and not (
            FINAL_METRICS in self._outputs and inputs[NEXT_STATE].progress.finished
        ):
            self._write(JUDGES, judge_counts(), self._iteration)
        if outputs.get(FINAL_METRICS):
            self._conclude(outputs[FINAL_METRICS])
        if self._temporary is not None:  # the nodes of the loop have no folder to write their metrics to
            if outputs.get("completions"):
                write_completions(self._folder, outputs["completions"])
            for kind, name in ((ITERATION, ITERATION_METRICS), (EVALUATION, EVALUATION_METRICS)):
                self._write(kind, outputs.get(name) or {}, self._iteration)
        self._write(AUDIT, (outputs.get("reward_audit") or {}).get("metrics", {}), 0)
        for name in HISTORIES:
            self._write_rows(outputs.get(name) or [])
        if samples := outputs.get("token_samples"):
            from ppo_rlhf.reporting.token_view import render_page

            page = self._folder / _page_of(samples["iteration"])
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(render_page([samples]), encoding="utf-8")
        self._mirror.wake()

    def _write(self, kind: str, metrics: Mapping[str, Any], step: int) -> None:
        if metrics:
            self._metrics.append(kind, step, metrics)

    def _write_step(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a stage's step that are not recorded yet."""
        new = {key: value for key, value in metrics.items() if (key, step) not in self._stages}
        self._stages |= {(key, step) for key in new}
        self._write(next(iter(new), "").partition("/")[0], new, step)
        self._mirror.wake()

    def _write_rows(self, rows: Sequence[Mapping[str, float]]) -> None:
        for row in rows:
            self._write_step({key: value for key, value in row.items() if key != "step"}, int(row["step"]))

    def _charts(self, line: Line) -> dict[str, float]:
        """Return the metrics of a line that MLflow shows.

        The SFT policy's evaluation metrics are constant, so only the run's last evaluation has them. An evaluation that
        the evaluation pipeline repeats on all held-out prompts has only what that does not measure, so that the curve
        does not get two points for one iteration.
        """
        row = line.metrics
        if line.kind not in (ITERATION, EVALUATION, FINAL):
            return row
        if line.kind == EVALUATION:
            is_last = bool(row.get(IS_LAST)) or EXPORTED in row
            is_repeated = FINAL_METRICS in self._outputs and bool(row.get(IS_LAST)) and EXPORTED not in row
            shown = _evaluations(row, SINCE_BEST if is_repeated else "eval/")
            is_last &= FINAL_METRICS not in self._outputs
        else:
            is_last = line.kind == FINAL
            shown = {key: x for key, x in row.items() if key not in NOT_METRICS}
        headlines = {key: row[key] for key in HEADLINES if key in row} if line.kind == FINAL else {}
        glance = {AT_A_GLANCE[key]: float(f"{x:.3g}") for key, x in shown.items() if key in AT_A_GLANCE}
        omitted = (ERROR,) if is_last else (ERROR, OF_SFT)
        charts = {**shown, **glance}
        return {
            key: x for key, x in charts.items() if not (key.startswith("eval/") and key.endswith(omitted))
        } | headlines

    def _send_samples(self, client: MlflowClient, line: Line) -> None:
        """Send the samples of an iteration, if there are any: the table of completions, and the page of tokens."""
        if line.kind != ITERATION:
            return
        own = self._folder / COMPLETIONS / f"{checkpoint_name(line.step)}.jsonl"
        if own.is_file():
            files = sorted(own.parent.glob("*.jsonl"))
            part, row = divmod(files.index(own), ITERATIONS_PER_TABLE)
            path = f"samples_{part + 1}.json" if part else "samples.json"
            of_part = files[part * ITERATIONS_PER_TABLE :][: row + 1]
            log_table(client, self._run_id, _table(of_part), path)
        page = self._folder / _page_of(line.step)
        if page.is_file():
            client.log_artifact(self._run_id, str(page), page.parent.name)
            page.unlink()

    def saved(self, name: str) -> None:
        """Log the path of a written model. Log the exported policy and critic as MLflow models as well.

        The policy of the best checkpoint is logged, too, if it is not the exported policy. A signal may interrupt the
        wait for the metrics, but not the logging of a model.
        """
        uri = mlflow.get_tracking_uri()
        with name_slow_store(uri):
            if (version := getattr(self._catalog.get(name), "pinned", None)) is not None:
                with log_store_errors(f"the path of {name}"):
                    mlflow.set_tag(f"{WRITTEN}{name}.{version.name}".replace("+", "_"), readable_path(version))
                    if (version / MADE_FROM).is_file():
                        mlflow.log_artifact(str(version / MADE_FROM), name)
            if name != POLICY and not (name == CRITIC and version is not None):
                return
            # MLflow links a logged model only with metrics that the MLflow run has, so send the metrics first
            has_metrics = self._mirror.flush(PATIENCE_AT_THE_END)
        from ppo_rlhf.hooks.model_log import best_checkpoint, log_critic, log_policy

        patience = nullcontext() if has_metrics else short_timeouts()
        with name_slow_store(uri, UPLOAD_S), deferring_signals(), patience:
            if name == CRITIC and version is not None:
                step = self._policy_iteration
                log_critic(version, CRITIC, step, self._keys_at(step))
                return
            handle = self._catalog[POLICY].load()
            config = parameter(self._catalog, "ppo")

            def log(directory: Path, name: str, step: int) -> str:
                return log_policy(
                    directory,
                    name,
                    step,
                    keys=self._keys_at(step),
                    config=config,
                    generation_config=handle.generation_config(),
                    trust_remote_code=handle.trust_remote_code,
                )

            self._model_id = log(Path(handle.source), POLICY, self._policy_iteration)
            try:
                best = best_checkpoint(self._catalog.get(CHECKPOINT), config, self._iteration)
            except CheckpointError as error:  # the exported policy is whole, so the run ends as it should
                logger.warning("MLflow gets no model %s: %s", BEST, error)
            else:
                if best is not None and best[1] != self._policy_iteration:
                    log(best[0], BEST, best[1])

    def close(self, *, is_finished: bool) -> bool:
        """Send what MLflow lacks, and return whether MLflow has everything."""
        progress_display.listeners.clear()
        try:
            self._write(JUDGES, judge_counts(), self._iteration)
        except CheckpointError as error:  # the disk may be what ended the run
            logger.warning("%s", error)
        if is_finished:
            self._write_left_out()
        for line in judges_in_words():
            logger.info("%s", line)
        can_resume = self._can_resume and bool(checkpoint_iterations(self._folder))
        has_everything = self._mirror.close(PATIENCE_AT_THE_END if is_finished else PATIENCE, can_resume=can_resume)
        self._rows = self._curves()
        if self._temporary is not None:
            self._temporary.cleanup()
        return has_everything

    def _write_left_out(self) -> None:
        """Record the metrics of stages that a resumed run left out."""
        entries = [self._catalog.get(name) for name in HISTORIES if name in self._outputs]
        stored = [entry for entry in entries if entry is not None and entry.exists()]
        if stored:
            self._stages |= {(key, line.step) for line in read_lines(self._metrics.path) for key in line.metrics}
        for entry in stored:
            self._write_rows(entry.load())

    def log_advice(self, environment: str | None = None) -> None:
        """Log which settings to change first, by the rules of docs/tuning.md; log nothing without metrics."""
        if not self._rows:
            return
        from ppo_rlhf.advice import in_words

        config = parameter(self._catalog, "ppo")
        command = f"kedro advise{env_option(environment)}"
        for line in [
            f"What to change first (`{command}` says it again):",
            *in_words(config, self._rows, command=command),
        ]:
            logger.info("%s", line)

    def _curves(self) -> list[dict[str, Any]]:
        """Return the metrics of each iteration, with those of its evaluation."""
        rows: dict[int, dict[str, Any]] = {}
        for line in read_lines(self._metrics.path):
            if line.kind == ITERATION:
                rows[line.step] = {**line.metrics}
            elif line.kind in (EVALUATION, FINAL) and line.step in rows:
                rows[line.step] |= _evaluations(line.metrics)
        return list(rows.values())

    def _keys_at(self, step: int) -> list[str]:
        """Return the keys of what MLflow shows of a PPO iteration and its evaluation."""
        kinds = (ITERATION, EVALUATION)
        lines = (line for line in read_lines(self._metrics.path) if line.step == step and line.kind in kinds)
        return [key for line in lines for key in self._charts(line)]

    def _conclude(self, summary: Mapping[str, Any]) -> None:
        """Log the final evaluation, put the verdict into the run's description, register the model.

        If the exported policy is not that of the last iteration, the step is the next one: the last iteration has an
        evaluation of its own.
        """
        step = self._iteration + (self._policy_iteration != self._iteration)
        self._write(
            FINAL, {**_evaluations(summary), **({} if self._model_id is None else {MODEL_ID: self._model_id})}, step
        )
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


def _evaluations(measured: Mapping[str, Any], beginning: str = "eval/") -> dict[str, float]:
    """Return the metrics of an evaluation, without the iteration, the prompts and the judge that it also names."""
    return {key: value for key, value in measured.items() if key.startswith(beginning)}


def _page_of(iteration: int) -> str:
    return f"token_view/{checkpoint_name(iteration)}.html"


def _table(files: Sequence[Path]) -> dict[str, Any]:
    """Return the first completions of each file as a table for MLflow's page."""
    from ppo_rlhf.data.readable_prompts import readable_prompt

    data = []
    for file in files:
        with file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, SAMPLES)]
        for row in rows:
            prompt = readable_prompt(row["prompt"], row.get("prompt_chat"), row.get("tools"))
            data.append([row["iteration"], prompt, *(row[name] for name in list(SAMPLED.values())[1:])])
    return {"columns": ["iteration", *SAMPLED], "data": data}
