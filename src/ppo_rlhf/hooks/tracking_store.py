"""MLflow's tracking store: its place, and one-line messages if the tracking store fails or does not answer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import mlflow
from kedro_mlflow.config.kedro_mlflow_config import ExperimentOptions, KedroMlflowConfig
from mlflow.entities import RunStatus
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri
from sqlalchemy import Engine, create_engine, inspect
from sqlalchemy.pool import NullPool

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import ConfigError, TrackingStoreError
from ppo_rlhf.datasets.tracking_errors import STORE_ERRORS, one_line, short_timeouts
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.locks import one_at_a_time
from ppo_rlhf.runtime.whole_files import written_whole

logger = logging.getLogger(__name__)
# hide MLflow's log of the traceback of an error, because MLflow also raises the error
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

SQLITE = "sqlite:///"
ARTIFACTS = "mlartifacts"
SLOW_S = 5.0
"""After this number of seconds a log line names the tracking store that a call waits for; MLflow itself is silent for
minutes."""
UPLOAD_S = 60.0
"""The same where weights are copied, which takes a busy machine some seconds for each GB."""


def place_in_project(settings: KedroMlflowConfig, project_path: Path) -> None:
    """Place a relative sqlite file of mlflow.yml in the project's root, and the artifacts beside the file.

    MLflow looks for the sqlite file and the artifacts in the working directory, so a run started in a subfolder or a
    notebook would get a second tracking store.

    Raises:
        ConfigError: No tracking store is named, or the sqlite file's path has a `?` or an escape such as `%20`, for
            which SQLAlchemy would create a file with another name.
    """
    uri = settings.server.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise ConfigError(
            "mlflow.yml: server.mlflow_tracking_uri is null, and MLFLOW_TRACKING_URI is not set. Set one of them."
        )
    if settings.server.mlflow_tracking_uri and uri.startswith(SQLITE):
        database = project_path / Path(uri.removeprefix(SQLITE)).expanduser()
        if reserved := re.search(r"\?|%[0-9A-Fa-f]{2}", str(database)):
            raise ConfigError(
                f"{database}: the path of MLflow's database cannot have {reserved[0]}, which has another meaning in a "
                "database URI. Rename the folder, or set another server.mlflow_tracking_uri in conf/local/mlflow.yml."
            )
        settings.server.mlflow_tracking_uri = f"{SQLITE}{database}"
        created = settings.tracking.experiment.create_experiment_kwargs
        created.artifact_location = created.artifact_location or str(database.parent / ARTIFACTS)


def check_artifacts(experiment: ExperimentOptions) -> None:
    """Refuse an experiment whose artifact folder cannot be written; warn if mlflow.yml names another folder.

    MLflow stores the artifact folder as an absolute path when MLflow creates an experiment, and cannot change it later.

    Raises:
        ConfigError: The artifact folder cannot be written, which MLflow would notice only at the end of the run.
    """
    uris = experiment._experiment.artifact_location, experiment.create_experiment_kwargs.artifact_location
    fixed, wanted = (local_file_uri_to_path(uri or "") for uri in uris)
    remedy = "To use another folder, give a new tracking.experiment.name in conf/local/mlflow.yml."
    if wanted not in ("", fixed):
        line = "Artifacts of the MLflow experiment %s go to %s, as set when the experiment was created, not to %s. %s"
        logger.warning(line, experiment.name, without_secrets(fixed), without_secrets(wanted), remedy)
    if is_local_uri(fixed):
        try:
            Path(fixed).mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=fixed).close()
        except OSError as error:
            raise ConfigError(f"{fixed}: MLflow's artifacts cannot be written: {error.strerror}. {remedy}") from error


def check_writable(database: Path) -> None:
    """Raise ConfigError if MLflow's sqlite file cannot be written. MLflow would retry for a minute."""
    for path in (database.parent, database):
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(
                f"{path}: no write permission, but the tracking database is written here. Give the permission, or set "
                "another server.mlflow_tracking_uri in conf/local/mlflow.yml."
            )


def kind_of_store(uri: str) -> str:
    """Return the scheme of a tracking store's address without the driver: `postgresql` of `postgresql+psycopg://…`."""
    return uri.partition(":")[0].partition("+")[0]


def database_engine(uri: str, **arguments: Any) -> Engine:
    """Return SQLAlchemy's engine of a database, without connecting to the database.

    Raises:
        ConfigError: The database's driver is not installed.
    """
    try:
        return create_engine(uri, connect_args=arguments, poolclass=NullPool)
    except ImportError as error:
        raise ConfigError(f"{without_secrets(uri)}: the database's driver is not installed ({error}).") from error


def check_answers(uri: str) -> None:
    """Raise one of STORE_ERRORS or ConfigError if MLflow's tracking server or database does not answer. Nothing is
    written.

    A missing sqlite file passes the check if it can be created. Tracking stores that are neither servers nor databases
    always pass the check.
    """
    kind = kind_of_store(uri)
    if uri.startswith(SQLITE):
        database = Path(uri.removeprefix(SQLITE))
        check_writable(database)
        if not database.exists():
            return
        uri = f"{SQLITE}file:{database}?mode=ro&uri=true"
    if kind in DATABASE_ENGINES:  # MLflow creates missing tables when it connects, so connect without MLflow
        patience = {} if kind == "sqlite" else {"connect_timeout": round(SLOW_S)}
        inspect(database_engine(uri, **patience)).get_table_names()
    elif kind in ("http", "https"):
        with short_timeouts():
            mlflow.MlflowClient(uri).search_experiments(max_results=1)


def make_database(database: Path) -> None:
    """Create MLflow's sqlite file if it is missing: written under another name, then renamed, by one process at a time.

    MLflow itself creates the tables one by one in the final file. If a kill interrupts the creation of the tables,
    MLflow refuses the file for ever.

    Raises:
        ConfigError: MLflow's sqlite file cannot be written.
    """
    check_writable(database)
    if database.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    database.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(database.parent):
        if not database.exists():
            logger.info("Creating the tracking database %s.", database)
            with written_whole(database) as draft:
                SqlAlchemyStore(f"{SQLITE}{draft}", str(database.parent / ARTIFACTS)).engine.dispose()


def name_slow_store(uri: str, seconds: float | None = None) -> AbstractContextManager[None]:
    """Log the name of the tracking store if the `with` block takes more than `seconds`; None: SLOW_S."""
    advice = "MLflow keeps retrying; press Ctrl-C twice to stop at once."
    return processes.warn_if_slow(f"The tracking store {without_secrets(uri)}", advice, seconds=seconds or SLOW_S)


def end_active_run(status: int = RunStatus.FAILED) -> None:
    """End the active MLflow run, if any, with a status of MLflow's RunStatus; warn if the tracking store fails."""
    with log_store_errors("how the run ended"):
        mlflow.end_run(RunStatus.to_string(status))


@contextmanager
def log_store_errors(what: str) -> Iterator[None]:
    """Turn a failure of the tracking store into a warning that `what` is not recorded, so that the run continues."""
    try:
        yield
    except STORE_ERRORS as error:
        logger.warning("MLflow could not record %s: %s", what, one_line(error))


@contextmanager
def store_errors_as_config_errors(complaint: str) -> Iterator[None]:
    """Turn a failure of the tracking store into a TrackingStoreError whose message begins with `complaint`."""
    try:
        yield
    except STORE_ERRORS as error:
        raise TrackingStoreError(f"{complaint}: {one_line(error)}") from error
