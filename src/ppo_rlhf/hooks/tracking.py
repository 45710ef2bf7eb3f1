"""The run in MLflow: kedro-mlflow owns its life, this hook says what goes into it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import mlflow
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.config.resolvers import resolve_random_name
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from kedro_mlflow.framework.hooks.utils import _assert_mlflow_enabled
from mlflow.entities import RunStatus
from mlflow.exceptions import MlflowException
from omegaconf import OmegaConf
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.hyperparameters import changed_settings, hyperparameters, parameter, parameter_groups
from ppo_rlhf.hooks.metric_log import MetricLog
from ppo_rlhf.hooks.provenance import git_tags, input_tags, version_tags
from ppo_rlhf.runner import CARRY_IN, CARRY_OUT, RunInterruptedError, deferring_signals

logger = logging.getLogger(__name__)

ITERATION_METRICS = "ppo_metrics"
EVALUATION_METRICS = "evaluation_metrics"
FINAL_METRICS = "evaluation_summary"
HISTORIES = ("sft_metrics", "reward_model_metrics")
SAMPLED_NODE = "estimate_advantages"
SAMPLE_TABLE = "samples.json"
POLICY = "ppo_policy"
CHECKPOINT = "checkpoint"
BEST = "best_checkpoint"
SQLITE = "sqlite:///"
ARTIFACTS = "mlartifacts"
MOST_PARAMS_PER_BATCH = 100  # MLflow's limit


class TrackingHook(MlflowHook):
    """kedro-mlflow's hook with three differences.

    The store is opened when a run starts, not when a context is made: a run that is refused leaves no database behind.
    Hyperparameters are logged one by one (kedro-mlflow logs a validated group as one string). A run that a signal
    stopped ends KILLED. With tracking disabled for the pipelines (`disable_tracking` in mlflow.yml) nothing happens.
    """

    def __init__(self) -> None:
        """Start without a run."""
        super().__init__()
        self._context: KedroContext | None = None
        self._catalog: CatalogProtocol | None = None
        self._metrics: MetricLog | None = None
        self._saving = ExitStack()
        self._iteration = 0
        self._model_id: str | None = None
        self._evaluated_at_end = False

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read mlflow.yml and leave it in the context, as `kedro mlflow ui` expects."""
        if not OmegaConf.has_resolver("km.random_name"):
            OmegaConf.register_new_resolver("km.random_name", resolve_random_name, use_cache=True)
        context.config_loader.config_patterns.setdefault("mlflow", ["mlflow*", "mlflow*/**", "**/mlflow*"])
        settings = settled_in_project(context.config_loader["mlflow"], Path(context.project_path))
        context.config_loader["mlflow"] = settings
        self._context = context
        command = click.get_current_context(silent=True)
        if command is not None and command.info_name == "modelify":  # kedro-mlflow's own, needs the open store
            super().after_context_created(context)
            return
        try:
            self.mlflow_config = KedroMlflowConfig.model_validate(settings)
        except ValidationError as error:
            raise ConfigError("\n".join(map(_as_line, error.errors()))) from error
        context.mlflow = self.mlflow_config  # type: ignore[attr-defined]

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Start the run and log what is known of it."""
        names = run_params["pipeline_names"] or ["__default__"]
        if not _assert_mlflow_enabled(names, self.mlflow_config):
            super().before_pipeline_run(run_params, pipeline, catalog)
            return
        with deferring_signals():
            with self._store_in_plain_words():
                super().after_context_created(self._context)  # opens the store
                super().before_pipeline_run(run_params, pipeline, catalog)
            self._start(run_params, names, pipeline, catalog)

    def _start(
        self, run_params: dict[str, Any], names: list[str], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        self._catalog, self._metrics = catalog, MetricLog(str(self.run_id))
        self._iteration, self._model_id = 0, None
        self._evaluated_at_end = FINAL_METRICS in pipeline.all_outputs()  # then not twice at the last iteration's step
        logger.info("MLflow run %s (kedro mlflow ui)", self.run_id)
        try:
            self._describe(run_params, names, pipeline, catalog)
        except BaseException:  # Kedro tells no hook of an error that comes before the first node
            end_active_run(RunStatus.FAILED)
            raise

    @hook_impl
    def before_node_run(self, node: Node, catalog: CatalogProtocol, inputs: dict[str, Any], is_async: bool) -> None:
        """Make the run known to a thread that another runner started; in the main thread there is nothing to do.

        kedro-mlflow reopens the run at each node and logs its parameters, several database calls each.
        """
        if self._is_mlflow_enabled and self.run_id is not None and mlflow.active_run() is None:
            mlflow.start_run(run_id=self.run_id)

    @hook_impl
    def after_node_run(self, node: Node, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Log what the node measured."""
        if self._metrics is not None:
            with deferring_signals():
                self._log_outputs(self._metrics, node, inputs, outputs)

    def _log_outputs(self, log: MetricLog, node: Node, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        if CARRY_IN in inputs and CARRY_OUT not in outputs:
            self._iteration = inputs[CARRY_IN].iteration + 1
        elif CARRY_OUT in outputs:
            self._iteration = outputs[CARRY_OUT].iteration
        elif CARRY_OUT in inputs:
            self._iteration = inputs[CARRY_OUT].iteration
        if outputs.get(ITERATION_METRICS):
            log.log(outputs[ITERATION_METRICS], self._iteration)
        if outputs.get(EVALUATION_METRICS) and not (self._evaluated_at_end and inputs[CARRY_OUT].finished):
            log.log(_evaluations(outputs[EVALUATION_METRICS]), self._iteration)
        if outputs.get(FINAL_METRICS):
            log.log(_evaluations(outputs[FINAL_METRICS]), self._iteration, model_id=self._model_id)
        for name in HISTORIES:
            if outputs.get(name):
                log.log_history(outputs[name])
        if node.name.rpartition(".")[2] == SAMPLED_NODE:
            self._log_samples(inputs)

    @hook_impl
    def before_dataset_saved(self, dataset_name: str) -> None:
        """Let no signal cut through a dataset that kedro-mlflow logs as an artifact while it saves it."""
        if self._catalog is not None and type(self._catalog.get(dataset_name)).__name__.startswith("Mlflow"):
            self._saving.enter_context(deferring_signals())

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        """Log the exported policy as a model, and the best checkpoint's if that is another one."""
        self._saving.close()
        if self._metrics is not None and self._catalog is not None and dataset_name == POLICY:
            with deferring_signals():
                self._log_models(self._metrics, self._catalog)

    def _log_models(self, log: MetricLog, catalog: CatalogProtocol) -> None:
        from ppo_rlhf.hooks.model_log import best_checkpoint, log_policy  # heavy: only runs that export pay for it

        log.flush()  # MLflow links a model with the metrics that the run has at the model's step
        self._model_id = log_policy(Path(catalog[POLICY].load().source), POLICY, self._iteration)
        best = best_checkpoint(catalog.get(CHECKPOINT), parameter(catalog, "ppo").kl_alarm)
        if best is not None and best[1] != self._iteration:
            log_policy(best[0], BEST, best[1])

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """End the run as FINISHED."""
        with deferring_signals():
            self._finish()
            super().after_pipeline_run(run_params, pipeline, catalog)

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """End the run: KILLED if a signal stopped it, else FAILED."""
        with deferring_signals():
            self._finish()
            if self._is_mlflow_enabled and mlflow.active_run() is not None:
                mlflow.set_tag("error", f"{type(error).__name__}: {error}"[:500])
                if isinstance(error, RunInterruptedError) and not self._already_active_mlflow:
                    end_active_run(RunStatus.KILLED)
                    return
            super().on_pipeline_error(error, run_params, pipeline, catalog)

    @contextmanager
    def _store_in_plain_words(self) -> Iterator[None]:
        try:
            yield
        except (MlflowException, SQLAlchemyError, OSError) as error:
            uri = self.mlflow_config.server.mlflow_tracking_uri
            raise ConfigError(f"mlflow.yml: the tracking store {uri} cannot be used: {_one_line(error)}") from error

    def _describe(
        self, run_params: dict[str, Any], names: list[str], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        groups = parameter_groups(pipeline, catalog)
        params = list(hyperparameters(groups).items())
        for start in range(0, len(params), MOST_PARAMS_PER_BATCH):
            mlflow.log_params(dict(params[start : start + MOST_PARAMS_PER_BATCH]))
        project_path = Path(run_params["project_path"])
        seed = next((group.seed for group in groups.values() if hasattr(group, "seed")), None)
        changed = ", ".join(f"{name}={value}" for name, value in changed_settings(groups).items())
        mlflow.set_tags(
            {
                "pipeline": ",".join(names),
                "environment": run_params["env"] or "local",
                **({} if seed is None else {"seed": str(seed)}),
                **({"ppo.not_default": changed} if changed else {}),
                **git_tags(project_path),
                **version_tags(),
                **input_tags(pipeline, catalog),
            }
        )

    def _log_samples(self, inputs: Mapping[str, Any]) -> None:
        interval = inputs["ppo_config"].sample_interval
        if self._iteration != 1 and self._iteration % interval:
            return
        from ppo_rlhf.training.experience import sample_table  # heavy: only runs that train pay for it

        table = sample_table(inputs["rollouts"], inputs["scores"], inputs["shaped_rewards"])
        rows = len(next(iter(table.values()), []))
        mlflow.log_table({"iteration": [self._iteration] * rows, **table}, SAMPLE_TABLE)

    def _finish(self) -> None:
        self._saving.close()
        if self._metrics is not None:
            self._metrics.flush()
        self._metrics = self._catalog = None


def _evaluations(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among what an evaluation gives, which also says of which iteration, prompts and judge."""
    return {key: value for key, value in measured.items() if key.startswith("eval/")}


def end_active_run(status: int = RunStatus.FAILED) -> None:
    """End the active MLflow run, if there is one, with a status of MLflow's RunStatus."""
    mlflow.end_run(RunStatus.to_string(status))


def settled_in_project(settings: Mapping[str, Any], project_path: Path) -> dict[str, Any]:
    """Return mlflow.yml's settings with a relative sqlite file, and its artifacts, placed in the project's root.

    MLflow takes both from the working directory: a run started in a subfolder or a notebook would get a second store.
    """
    settings = {**settings}
    server = {**(settings.get("server") or {})}
    uri = server.get("mlflow_tracking_uri") or ""
    if uri.startswith(SQLITE):
        server["mlflow_tracking_uri"] = f"{SQLITE}{project_path / uri.removeprefix(SQLITE)}"
        settings["server"] = server
        tracking = {**(settings.get("tracking") or {})}
        experiment = {**(tracking.get("experiment") or {})}
        created = {**(experiment.get("create_experiment_kwargs") or {})}
        created["artifact_location"] = created.get("artifact_location") or str(project_path / ARTIFACTS)
        settings["tracking"] = {**tracking, "experiment": {**experiment, "create_experiment_kwargs": created}}
    return settings


def _one_line(error: Exception) -> str:
    text = re.split(r"\n[\[(](?:SQL|Background)", str(error))[0]  # SQLAlchemy goes on with the statement and a link
    return " ".join(text.split())


def _as_line(detail: Mapping[str, Any]) -> str:
    return f"mlflow.yml: {'.'.join(map(str, detail['loc']))}={detail['input']!r}: {detail['msg']}"
