"""The run in MLflow: kedro-mlflow owns its life, this hook says what goes into it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import mlflow
from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.config.resolvers import resolve_random_name
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from kedro_mlflow.framework.hooks.utils import _assert_mlflow_enabled
from mlflow.entities import RunStatus, RunTag
from omegaconf import OmegaConf
from pydantic import ValidationError

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.run_description import RunDescription, describe_run, pipeline_names
from ppo_rlhf.hooks.run_end import END_TAGS, end_tags, way_to_go_on
from ppo_rlhf.hooks.run_lock import RunLock, one_at_a_time
from ppo_rlhf.hooks.tracking_store import (
    SQLITE,
    asked_twice,
    end_active_run,
    named_if_slow,
    noting_refusals,
    settled_in_project,
    store_errors_said_once,
    store_in_plain_words,
    uri_in_project,
    without_password,
)
from ppo_rlhf.imports import collector_paused, not_installed
from ppo_rlhf.runner import RunInterruptedError, TerminationSignal, deferring_signals, plan_loop

if TYPE_CHECKING:  # heavy: only a run pays for them
    from ppo_rlhf.datasets import ResumeCheckpointDataset
    from ppo_rlhf.hooks.resumption import Resumption
    from ppo_rlhf.hooks.run_log import RunLog

logger = logging.getLogger(__name__)

RESUME_CHECKPOINT = "resume_checkpoint"
GIVEN_URI = os.environ.get("MLFLOW_TRACKING_URI")  # of the person: MLflow sets the variable itself once a store is open
MOST_PARAMS_PER_BATCH = 100  # MLflow's limit


class TrackingHook(MlflowHook):
    """kedro-mlflow's hook with five differences.

    The store is opened when a run starts, not when a context is made: a run that is refused leaves no database behind.
    `resume` continues a run. Hyperparameters are logged one by one (kedro-mlflow logs a validated group as one string).
    A run that a signal stopped ends KILLED. IPython is not imported to learn that a run is in no notebook.
    With tracking disabled for the pipelines (`disable_tracking` in mlflow.yml) nothing happens.
    """

    def __init__(self) -> None:
        """Start without a run."""
        super().__init__()
        self._context: KedroContext | None = None
        self._catalog: CatalogProtocol | None = None
        self._log: RunLog | None = None
        self._lock: RunLock | None = None
        self._checkpoints: Path | None = None
        self._saving = ExitStack()
        self._quiet = ExitStack()

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read mlflow.yml and leave it in the context, as `kedro mlflow ui` expects."""
        if not OmegaConf.has_resolver("km.random_name"):
            OmegaConf.register_new_resolver("km.random_name", resolve_random_name, use_cache=True)
        patterns = cast(OmegaConfigLoader, context.config_loader).config_patterns
        patterns.setdefault("mlflow", ["mlflow*", "mlflow*/**", "**/mlflow*"])
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
        """Start the run, or go on with the one that `resume` asks for, and log what is known of it."""
        self._let_go()
        self.run_id = None  # of an earlier run in this process
        names = pipeline_names(run_params)
        entry = _resume_entry(pipeline, catalog)
        if not _assert_mlflow_enabled(names, self.mlflow_config):
            super().before_pipeline_run(run_params, pipeline, catalog)
            if entry is not None and entry.requested is not None:
                entry.resolve(_untracked_checkpoint(entry, names, Path(run_params["project_path"])))
            return
        is_ours = mlflow.active_run() is None
        try:
            with deferring_signals():
                self._quiet.enter_context(store_errors_said_once())
                try:
                    self._start(run_params, pipeline, catalog, entry)
                except BaseException:  # Kedro tells no hook of an error that comes before the first node
                    if is_ours:
                        end_active_run(RunStatus.FAILED)
                    self._let_go()
                    raise
        except TerminationSignal as stop:  # nor of a signal
            self.on_pipeline_error(RunInterruptedError(stop.signum), run_params, pipeline, catalog)
            raise

    def _open_store(self, run_params: Mapping[str, Any]) -> None:
        """Open it alone: of two processes that make a database at once, one fails."""
        with named_if_slow(self._uri), store_in_plain_words(self._complaint("cannot be used")), ExitStack() as alone:
            if self._uri.startswith(SQLITE):
                alone.enter_context(one_at_a_time(Path(run_params["project_path"])))
            super().after_context_created(self._context)
        used = GIVEN_URI and uri_in_project(GIVEN_URI, Path(run_params["project_path"])) == mlflow.get_tracking_uri()
        if GIVEN_URI and not used and mlflow.active_run() is None:
            logger.warning("MLFLOW_TRACKING_URI is not used: server.mlflow_tracking_uri in mlflow.yml is.")

    @collector_paused()  # much of MLflow is imported here
    def _start(
        self,
        run_params: dict[str, Any],
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        entry: ResumeCheckpointDataset | None,
    ) -> None:
        from ppo_rlhf.hooks.run_log import RunLog

        project_path = Path(run_params["project_path"])
        this = describe_run(run_params, pipeline, catalog)
        self._open_store(run_params)
        with store_in_plain_words(self._complaint("cannot be used")):
            resumption = self._resumption(this, entry, project_path)
            if resumption is None:
                self._lock = None if entry is None else self._lock_given_run(entry.root)
                self._start_run(run_params, pipeline, catalog)
                logger.info("MLflow run %s (kedro mlflow ui)", self.run_id)
            else:
                self._lock = resumption.lock
                resumption.say(project_path)
                self._reopen(resumption, run_params, pipeline, catalog)
            if entry is not None:
                self._checkpoints = entry.root / str(self.run_id)
                self._lock = self._lock or RunLock.take(self._checkpoints)
            self._describe(this, resumption, project_path)
            self._log = RunLog(str(self.run_id), pipeline, catalog, resumption)
        self._catalog = catalog

    def _start_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Let kedro-mlflow start the run.

        MLflow asks IPython whether the run is in a notebook. Where nobody has imported IPython it is in none, and to
        import it would only take time: a twentieth of that up to the first node.
        """
        with not_installed("IPython"):
            super().before_pipeline_run(run_params, pipeline, catalog)

    def _resumption(
        self, this: RunDescription, entry: ResumeCheckpointDataset | None, project_path: Path
    ) -> Resumption | None:
        if entry is None or entry.requested is None:
            return None
        from ppo_rlhf.hooks.resumption import ResumeRequest, find_resumption

        active = mlflow.active_run()
        request = ResumeRequest(
            requested=entry.requested,
            this=this,
            root=entry.root,
            project_path=project_path,
            experiment_id=(active.info if active else self.mlflow_config.tracking.experiment._experiment).experiment_id,
            active_run=active.info.run_id if active else None,
        )
        resumption = find_resumption(request, mlflow.MlflowClient())
        entry.resolve(None if resumption is None else resumption.checkpoint)
        return resumption

    def _lock_given_run(self, root: Path) -> RunLock | None:
        """Lock the MLflow run that this training is told to use; None: it gets one of its own."""
        from ppo_rlhf.hooks.resumption import lock_given_run

        active = mlflow.active_run()
        given = self.mlflow_config.tracking.run.id or os.environ.get("MLFLOW_RUN_ID")
        run_id = active.info.run_id if active else given
        if not run_id:
            return None
        mlflow.get_run(run_id)  # raises if there is none: then no directory is made
        return lock_given_run(run_id, root)

    def _reopen(
        self, resumption: Resumption, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """Let kedro-mlflow start the run that goes on; name and tags stay those of its first start."""
        from ppo_rlhf.checkpoints.files import sweep_leftovers

        run = resumption.run
        sweep_leftovers(resumption.directory)
        self.mlflow_config.tracking.run.id = run.info.run_id
        self.mlflow_config.tracking.run.name = run.info.run_name
        self._start_run(run_params, pipeline, catalog)
        client = mlflow.MlflowClient()
        for name in END_TAGS & run.data.tags.keys():
            client.delete_tag(run.info.run_id, name)
        kept = {*run_params, "kedro_command"} & run.data.tags.keys()
        mlflow.set_tags({name: run.data.tags[name] for name in kept})

    def _describe(self, this: RunDescription, resumption: Resumption | None, project_path: Path) -> None:
        known = None if resumption is None else resumption.run.data
        params = [(name, value) for name, value in this.params.items() if known is None or name not in known.params]
        for start in range(0, len(params), MOST_PARAMS_PER_BATCH):
            mlflow.log_params(dict(params[start : start + MOST_PARAMS_PER_BATCH]))
        tags = {name: value for name, value in this.tags.items() if known is None or name not in known.tags}
        mlflow.set_tags({**tags, **({} if resumption is None else resumption.tags(project_path))})

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
        if self._log is not None:
            with deferring_signals():
                self._log.node_ran(node, inputs, outputs)

    @hook_impl
    def before_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Let no signal cut through a dataset that kedro-mlflow logs while it saves it."""
        if self._catalog is None:
            return
        dataset = self._catalog.get(dataset_name)
        if type(getattr(dataset, "wrapped", dataset)).__name__.startswith("Mlflow"):
            self._saving.enter_context(deferring_signals())

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        """Log the exported policy as a model."""
        self._saving.close()
        if self._log is not None:
            with store_in_plain_words(self._complaint("did not take the model")):
                self._log.saved(dataset_name)

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """End the run as FINISHED."""
        with deferring_signals():
            try:
                with store_in_plain_words(
                    f"Everything is done and saved, but {self._complaint('could not record the end')}"
                ):
                    has_everything = self._close_log(is_finished=True)
                    with nullcontext() if has_everything else asked_twice():
                        super().after_pipeline_run(run_params, pipeline, catalog)
            finally:
                self._let_go()

    @hook_impl
    def on_pipeline_error(
        self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol
    ) -> None:
        """End the run: KILLED if a signal stopped it, else FAILED. Say how it can go on."""
        with deferring_signals(), asked_twice():
            self._saving.close()
            if self._is_mlflow_enabled and self.run_id is not None:
                project_path = Path(run_params["project_path"])
                self._close_log(is_finished=False)
                with noting_refusals("why the run ended"):
                    tags = end_tags(error, self._checkpoints, project_path)
                    mlflow.MlflowClient().log_batch(self.run_id, tags=[RunTag(*tag) for tag in tags.items()])
                if not self._already_active_mlflow:
                    is_stopped = isinstance(error, RunInterruptedError)
                    end_active_run(RunStatus.KILLED if is_stopped else RunStatus.FAILED)
                if self._checkpoints is not None:
                    logger.info("%s", way_to_go_on(error, self._checkpoints, run_params))
            else:
                super().on_pipeline_error(error, run_params, pipeline, catalog)
            self._let_go()

    def _close_log(self, *, is_finished: bool) -> bool:
        """Return whether MLflow has all that was logged."""
        log, self._log, self._catalog = self._log, None, None
        return log is None or log.close(is_finished=is_finished)

    def _let_go(self) -> None:
        """Forget the run, and let others have it."""
        self._saving.close()
        self._quiet.close()
        self._log = self._catalog = self._checkpoints = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _complaint(self, what: str) -> str:
        return f"mlflow.yml: the tracking store {without_password(self._uri)} {what}"

    @property
    def _uri(self) -> str:
        return str(self.mlflow_config.server.mlflow_tracking_uri or mlflow.get_tracking_uri())


def _resume_entry(pipeline: Pipeline, catalog: CatalogProtocol) -> ResumeCheckpointDataset | None:
    """Return the catalog's entry for what `resume` asks for, None for a run without the loop: it goes on with none."""
    is_loop = plan_loop(pipeline) is not None
    if not is_loop and RESUME_CHECKPOINT not in pipeline.inputs():
        return None
    from ppo_rlhf.datasets.resume_checkpoint import LATEST, ResumeCheckpointDataset

    entry = catalog.get(RESUME_CHECKPOINT)
    if not isinstance(entry, ResumeCheckpointDataset):
        return None
    if is_loop:
        return entry
    if entry.requested == LATEST:
        logger.info("resume=%s: this run holds a part of the loop alone, so it starts from the beginning.", LATEST)
        entry.resolve(None)
    return None


def _untracked_checkpoint(entry: ResumeCheckpointDataset, names: list[str], project_path: Path) -> Path:
    """Return the checkpoint that `resume` names; only MLflow could tell which one anything else means."""
    from ppo_rlhf.datasets.resume_checkpoint import LATEST
    from ppo_rlhf.preflight.resume import find_named

    requested = str(entry.requested)
    checkpoint = None if requested == LATEST else find_named(requested, entry.root, project_path).checkpoint
    if checkpoint is None:
        raise ConfigError(
            f"resume={requested}: mlflow.yml disables tracking for {', '.join(names)}, so no run can be looked up; "
            "give the directory of a checkpoint."
        )
    return checkpoint


def _as_line(detail: Mapping[str, Any]) -> str:
    return f"mlflow.yml: {'.'.join(map(str, detail['loc']))}={detail['input']!r}: {detail['msg']}"
