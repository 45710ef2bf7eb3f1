"""Tracks a run in MLflow. kedro-mlflow opens and ends the MLflow run; `TrackingHook` decides what is recorded."""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import mlflow
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.config.resolvers import resolve_random_name
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from mlflow.entities import RunStatus, RunTag
from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from mlflow.store.db.db_types import DATABASE_ENGINES
from omegaconf import OmegaConf
from pydantic import ValidationError

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import CheckpointError, ConfigError, LaunchError, RewardError, project_error
from ppo_rlhf.datasets import mlflow_queue
from ppo_rlhf.datasets.tracking_errors import short_timeouts
from ppo_rlhf.hooks.abandoned import end_abandoned
from ppo_rlhf.hooks.moved_artifacts import follow_artifacts
from ppo_rlhf.hooks.run_description import (
    DTYPE,
    INPUT_PATH,
    RunDescription,
    describe_run,
    log_inputs,
    parameter,
    pipeline_names,
    settle_dtype,
)
from ppo_rlhf.hooks.run_end import END_TAGS, end_tags, resume_hint
from ppo_rlhf.hooks.run_record import RUN_FOLDERS, RunRecord
from ppo_rlhf.hooks.tracking_store import (
    SQLITE,
    check_artifacts,
    database_engine,
    end_active_run,
    kind_of_store,
    log_store_errors,
    make_database,
    name_slow_store,
    place_in_project,
    store_errors_as_config_errors,
)
from ppo_rlhf.hooks.worker import agree_on_run
from ppo_rlhf.runtime import paths
from ppo_rlhf.runtime.locks import lock_run, one_at_a_time
from ppo_rlhf.runtime.names import RESUME_CHECKPOINT, SET, TRAININGS, env_option, untracked
from ppo_rlhf.runtime.signals import RunInterruptedError, as_error, deferring_signals
from ppo_rlhf.runtime.whole_files import delete_abandoned_drafts

if TYPE_CHECKING:
    from ppo_rlhf.datasets import ResumeCheckpointDataset
    from ppo_rlhf.hooks.resume import Named, Resumption
    from ppo_rlhf.hooks.run_log import RunLog

logger = logging.getLogger(__name__)

VIEW = "ppo_rlhf"
_AT_A_GLANCE = [f"metrics.`at_a_glance/{name}`" for name in ("win_rate", "reward", "kl")]
_NAME, _SET, _NOT_DEFAULT = "attributes.`Run Name`", f"tags.`{SET}`", "tags.`ppo.not_default`"
# MLflow sorts the columns by name and cuts headings at 100 pixels, unless the view has an order and widths
_WIDTHS = {_NAME: 400, **dict.fromkeys(_AT_A_GLANCE, 150), _SET: 180, _NOT_DEFAULT: 180}
COLUMNS = json.dumps(
    {
        "selectedColumns": [*_AT_A_GLANCE, _SET, _NOT_DEFAULT],
        "columnOrder": [*_WIDTHS, "runDateAndNestInfo", "duration"],
        "columnWidths": _WIDTHS,
    }
)
# Read the environment variable when this module is imported, because MLflow sets the environment variable when MLflow
# opens a store
GIVEN_URI = os.environ.get("MLFLOW_TRACKING_URI")


class TrackingHook(MlflowHook):
    """kedro-mlflow's hook with four changes, for which kedro-mlflow 2.0 has no setting.

    1. The tracking store is opened when a run starts, not when a context is created, so that a refused run leaves no
       database.
    2. Each hyperparameter is logged as one param, once per run. kedro-mlflow logs a validated group as one string, at
       every node.
    3. `resume` continues an MLflow run. A new run gets its tags at its creation.
    4. A run that a signal stopped ends with the status KILLED.

    If tracking is disabled for the pipelines (`disable_tracking` in mlflow.yml), nothing is recorded.
    """

    _context: KedroContext

    def __init__(self) -> None:
        super().__init__()
        self._has_system_metrics = False
        self._catalog: CatalogProtocol | None = None
        self._log: RunLog | None = None
        self._saving = ExitStack()
        self._lock: IO[bytes] | None = None
        self._checkpoints: Path | None = None
        self._record: RunRecord | None = None
        self._is_sweep = False

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read mlflow.yml and store the settings as `context.mlflow`, where `kedro mlflow ui` looks for it."""
        if not OmegaConf.has_resolver("km.random_name"):
            OmegaConf.register_new_resolver("km.random_name", resolve_random_name, use_cache=True)
        given = {**context.config_loader["mlflow"]}
        # system_metrics is a setting of this package that kedro-mlflow does not know
        self._has_system_metrics = given.pop("system_metrics", False) is True
        try:
            settings = KedroMlflowConfig.model_validate(given)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, each['loc']))}={each['input']!r}: {each['msg']}" for each in error.errors())
            raise ConfigError("\n".join(f"mlflow.yml: {line}" for line in lines)) from error
        place_in_project(settings, Path(context.project_path))
        mlflow_queue.place.uri = settings.server.mlflow_tracking_uri or mlflow.get_tracking_uri()
        mlflow_queue.place.experiment = settings.tracking.experiment.name
        mlflow_queue.place.ui = f"http://{settings.ui.host}:{settings.ui.port}"
        context.config_loader["mlflow"] = settings.model_dump()
        context.mlflow = self.mlflow_config = settings  # type: ignore[attr-defined]
        self._context = context

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Start an MLflow run, or resume the run that `resume` names, and log the run's params, tags and inputs."""
        from ppo_rlhf.hooks.resume import find_named, resume_entry

        self._let_go()
        self._is_sweep, project_path = TRAININGS in pipeline.all_outputs(), Path(run_params["project_path"])
        paths.running.project, paths.running.environment = project_path, run_params["env"]
        entry = resume_entry(pipeline, catalog)
        named = None if entry is None else find_named(entry.requested, entry.root, project_path)
        disabled = self.mlflow_config.tracking.disable_tracking.pipelines
        if all(name in disabled for name in pipeline_names(run_params)):
            super().before_pipeline_run(run_params, pipeline, catalog)
            settle_dtype(catalog)
            if entry is not None and named is not None and named[1] is not None:
                entry.resolve(named[1])
        else:
            self._open_store()
            try:
                # Defer signals while the lock is held, so that a signal can interrupt only the wait for the lock.
                with one_at_a_time(project_path), deferring_signals():
                    self._start(run_params, pipeline, catalog, entry, named)
            except BaseException as stop:  # Kedro's session calls no error hook for an error in a hook
                self.on_pipeline_error(as_error(stop))
                raise
        run = str(self.run_id or untracked.begin())
        dtype = getattr(parameter(catalog, "ppo"), "dtype", None)
        agree_on_run(run, None if entry is None else entry.checkpoint, self._checkpoints, dtype)

    def _open_store(self) -> None:
        """Open MLflow's tracking store; a signal may interrupt the wait for the tracking store."""
        if (active := mlflow.active_run()) is not None:
            raise ConfigError(f"MLflow run {active.info.run_id} is open already; call mlflow.end_run() first.")
        with store_errors_as_config_errors(self._complaint("cannot be used")):
            if kind_of_store(self._uri()) in DATABASE_ENGINES:
                database_engine(self._uri())  # MLflow would end in a traceback if the driver is missing
            if self._uri().startswith(SQLITE):
                make_database(Path(self._uri().removeprefix(SQLITE)))
                follow_artifacts(
                    self._uri(), self.mlflow_config.tracking.experiment.create_experiment_kwargs.artifact_location
                )
        with name_slow_store(self._uri()), store_errors_as_config_errors(self._complaint("cannot be used")):
            try:
                super().after_context_created(self._context)
            except MlflowException as error:
                if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
                    raise
                super().after_context_created(self._context)  # another run has just created the experiment
        check_artifacts(self.mlflow_config.tracking.experiment)
        if GIVEN_URI and GIVEN_URI.rstrip("/") != self._uri().rstrip("/"):
            logger.warning("MLFLOW_TRACKING_URI is not used, because mlflow.yml sets server.mlflow_tracking_uri.")

    def _start(
        self,
        run_params: dict[str, Any],
        pipeline: Pipeline,
        catalog: CatalogProtocol,
        entry: ResumeCheckpointDataset | None,
        named: Named | None,
    ) -> None:
        from ppo_rlhf.hooks.run_log import RunLog

        project_path, tracking = Path(run_params["project_path"]), self.mlflow_config.tracking
        this = describe_run(run_params, pipeline, catalog)
        root = getattr(catalog.get(RESUME_CHECKPOINT), "root", None)
        root = root if root is not None and root.is_absolute() else None  # a remote data_root has no folders here
        if root is not None:
            this.tags[RUN_FOLDERS] = paths.readable_path(root, project_path)
        with name_slow_store(self._uri()), store_errors_as_config_errors(self._complaint("cannot be used")):
            resumption = None if entry is None else self._resumption(this, entry, named)
            if resumption is not None:
                resumption.say(project_path, this, is_sweep=self._is_sweep)
                tracking.run.id, tracking.run.name = resumption.run.info.run_id, resumption.run.info.run_name
            resumed = None if resumption is None else resumption.run.info.run_id
            with log_store_errors("which runs died silently"):
                end_abandoned(project_path, tracking.experiment._experiment.experiment_id, resumed)
            settle_dtype(catalog, None if resumption is None else resumption.before.params.get(DTYPE))
            MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.set(self._has_system_metrics)
            run = mlflow.start_run(
                run_id=tracking.run.id,
                experiment_id=tracking.experiment._experiment.experiment_id,
                run_name=tracking.run.name or this.name,
                nested=tracking.run.nested,
                tags=this.tags if resumption is None else None,
            )
            self.run_id, self._is_mlflow_enabled = run.info.run_id, True
            self._say_where(run.info.experiment_id)
            if entry is not None:
                self._checkpoints = entry.root / run.info.run_id
            if root is not None:
                before = {} if resumption is None else resumption.before.params
                settled = {name: before[name] for name in this.chosen_here & before.keys()}
                settings = replace(this, params={**this.params, **settled})
                self._take_folder(project_path, root / run.info.run_id, settings)
            self._log = RunLog(
                run.info.run_id,
                pipeline,
                catalog,
                folder=None if self._record is None else self._record.folder,
                can_resume=self._checkpoints is not None,
            )
            self._catalog = catalog
            if resumption is not None:
                self._log.go_on(resumption.checkpoint, resumption.make_anew(this, pipeline))
                for name in END_TAGS & run.data.tags.keys():
                    mlflow.delete_tag(name)
                # Update the tag with the checkpoint folder, because the user may have moved the folder
                kept = run.data.tags.keys() - {RUN_FOLDERS}
                tags = {name: value for name, value in this.tags.items() if name not in kept}
                mlflow.set_tags({**tags, **resumption.tags(project_path)})
            mlflow.log_params({name: value for name, value in this.texts.items() if name not in run.data.params})
            log_inputs(this)

    def _take_folder(self, project_path: Path, folder: Path, this: RunDescription) -> None:
        """Lock the run's folder, and note in it the run's settings and what it reads."""
        try:
            self._lock = self._lock or lock_run(folder)
            record = RunRecord.of_folder(folder, project_path) or RunRecord(project_path, folder)
            record.params, record.tags = this.params, this.tags
            record.can_resume = self._checkpoints is not None
            record.note(reads=[path for tag, path in this.tags.items() if INPUT_PATH.fullmatch(tag)])
            delete_abandoned_drafts(folder)
            self._record = record
        except (CheckpointError, OSError) as error:
            if self._checkpoints is not None:
                raise
            logger.warning("`kedro clean` will not know this run, which has no folder: %s", error)

    def _resumption(
        self, this: RunDescription, entry: ResumeCheckpointDataset, named: Named | None
    ) -> Resumption | None:
        """Return the run to resume, with its directory locked; None for a new run."""
        from ppo_rlhf.hooks.resume import find_resumption

        tracking = self.mlflow_config.tracking
        if entry.requested is not None:
            experiment = mlflow.get_experiment_by_name(tracking.experiment.name)
            assert experiment is not None  # kedro-mlflow has created the experiment before this hook runs
            resumption = find_resumption(entry.requested, named, this, entry.root, experiment.experiment_id)
            entry.resolve(None if resumption is None else resumption.checkpoint)
            if resumption is not None:
                self._lock = resumption.lock
                return resumption
        given = tracking.run.id or os.environ.get("MLFLOW_RUN_ID")
        if given and (entry.root / given).is_dir():
            raise ConfigError(
                f"MLflow run {given} has trained before. To continue that run, set resume={given}. To start a new run, "
                "remove tracking.run.id from mlflow.yml, or unset MLFLOW_RUN_ID."
            )
        return None

    @hook_impl
    def before_node_run(self, node: Node, catalog: CatalogProtocol, inputs: dict[str, Any], is_async: bool) -> None:
        """Make the hook's run MLflow's active run if another run or no run is active, for example in another thread.

        kedro-mlflow also makes the run active before each node.
        """
        self._take_mlflow_back()

    @hook_impl
    def after_node_run(self, node: Node, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Log the metrics and samples of a node."""
        self._take_mlflow_back()
        if self._log is not None:
            with name_slow_store(self._uri()):
                self._log.node_ran(inputs, outputs)

    @hook_impl
    def before_dataset_saved(self, dataset_name: str) -> None:
        """Before kedro-mlflow logs a dataset, defer signals, and start a timer that logs the name of a slow tracking
        store.
        """
        if self._catalog is not None and type(self._catalog.get(dataset_name)).__name__.startswith("Mlflow"):
            self._saving.enter_context(deferring_signals())
            self._saving.enter_context(name_slow_store(self._uri()))

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        """Log the exported policy as a model. A signal may interrupt the wait for the metrics, but not the logging."""
        self._saving.close()
        version = None if self._catalog is None else getattr(self._catalog.get(dataset_name), "pinned", None)
        if self._record is not None and version is not None and version not in self._record.writes:
            self._record.note(writes=[version])
        if self._log is not None:
            with store_errors_as_config_errors(self._complaint("did not take the model")):
                self._log.saved(dataset_name)

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """End the run as FINISHED."""
        complaint = f"The run is done and saved, but {self._complaint('could not record the end of the run')}"
        with deferring_signals():
            try:
                with name_slow_store(self._uri()), store_errors_as_config_errors(complaint):
                    has_everything = self._log is None or self._log.close(is_finished=True)
                    with nullcontext() if has_everything else short_timeouts():
                        super().after_pipeline_run(run_params, pipeline, catalog)
            finally:
                log = self._log
                self._let_go()
                if log is not None:
                    log.log_advice(self._context.env)

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """End an open run, as KILLED if a signal stopped the run, else as FAILED. Log how the run can be resumed."""
        with deferring_signals(), suppress(SystemExit):  # rich raises SystemExit when rich writes to a closed pipe
            if self.run_id is not None:
                self._end(error)
            self._let_go()

    # LoopSession calls on_session_error for every error, also for an error outside of nodes
    on_session_error = on_pipeline_error

    def _end(self, error: Exception) -> None:
        project_path, is_stopped = Path(self._context.project_path), isinstance(error, RunInterruptedError)
        self._saving.close()
        with name_slow_store(self._uri()), short_timeouts():
            with log_store_errors("why the run ended"):
                self._take_mlflow_back()
                tags = end_tags(error, self._checkpoints, project_path)
                mlflow.MlflowClient().log_batch(self.run_id, tags=[RunTag(*tag) for tag in tags.items()])
            if self._log is not None:
                self._log.close(is_finished=False)
            end_active_run(RunStatus.KILLED if is_stopped else RunStatus.FAILED)
        if self._log is not None and not is_stopped and not isinstance(project_error(error), RewardError | LaunchError):
            self._log.log_advice(self._context.env)
        if self._checkpoints is not None:
            logger.info("%s", resume_hint(error, self._checkpoints, project_path, is_sweep=self._is_sweep))

    def _take_mlflow_back(self) -> None:
        """Make the run and its tracking URI active in MLflow again; a reward function may have changed either."""
        if self._log is None:
            return
        while (active := mlflow.active_run()) is not None and active.info.run_id != self.run_id:
            end_active_run(RunStatus.FINISHED)
        if mlflow.get_tracking_uri() != self._uri():
            mlflow.set_tracking_uri(self._uri())
        if active is None:
            mlflow.set_experiment(experiment_id=self.mlflow_config.tracking.experiment._experiment.experiment_id)
            mlflow.start_run(run_id=self.run_id)

    def _let_go(self) -> None:
        """Forget the run, and release its lock so that other processes can resume the run."""
        self._saving.close()
        self.run_id = self._log = self._catalog = self._checkpoints = self._record = None
        paths.running.project = paths.running.environment = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _say_where(self, experiment: str) -> None:
        """Log the addresses of the run's page and of the table of all runs.

        The columns of the table are set as a shared view of the experiment.
        """
        with log_store_errors("the columns of its table of runs"):
            mlflow.MlflowClient().set_experiment_tag(experiment, f"mlflow.sharedViewState.{VIEW}", COLUMNS)
        is_server, ui = self._uri().startswith("http"), self.mlflow_config.ui
        server = without_secrets(self._uri()).replace("***@", "") if is_server else f"http://{ui.host}:{ui.port}"
        ui_too = "" if is_server else f", and all runs, in `kedro mlflow ui{env_option(self._context.env)}`"
        logger.info("MLflow run %s%s:", self.run_id, ui_too)
        logger.info("%s/#/runs/%s", server, self.run_id)
        # Of 100 columns a line of the log leaves 80 to its text, which an address may not exceed
        logger.info("%s/#/experiments/%s/runs?viewStateShareKey=%s", server, experiment, VIEW)

    def _complaint(self, what: str) -> str:
        return f"mlflow.yml: the tracking store {without_secrets(self._uri())} {what}"

    def _uri(self) -> str:
        return str(self.mlflow_config.server.mlflow_tracking_uri or mlflow.get_tracking_uri())
