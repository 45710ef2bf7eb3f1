"""What the project needs of the process that it runs in."""

import logging
import os
from typing import Any

import mlflow.telemetry

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.escaped_text import EscapedRecord, escaped


class ShownRecord(EscapedRecord):
    """A log record whose text has neither control characters nor passwords and tokens of addresses."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = escaped(without_secrets(logging.Formatter().formatException(self.exc_info)))

    def getMessage(self) -> str:  # noqa: N802  # logging's name
        """Return the message as a terminal may show it."""
        return without_secrets(super().getMessage())


def prepare_process() -> None:
    """Prepare logging and MLflow where a command begins, and where Kedro creates a context, as in a notebook.

    Log records show neither control characters nor passwords of addresses; MLflow sends no telemetry and prints neither
    progress bars nor addresses. Environment variables that are set already keep their values.
    """
    logging.setLogRecordFactory(ShownRecord)  # Kedro's logging.yml cannot name a class of log records
    os.environ.setdefault("DO_NOT_TRACK", "true")
    # Make MLflow read DO_NOT_TRACK again, because MLflow was imported before the variable was set
    mlflow.telemetry.set_telemetry_client()
    # Hide MLflow's progress bars, because the training loop shows its own
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # Hide the tracking URI, because MLflow would print the password in the URI
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # A tracking server that is down delays the run by seconds, not minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    # Together with the retries, a tracking server that hangs delays the run by a minute and a half
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
