"""The errors of an MLflow tracking store, the errors' text in one line, and short timeouts for a tracking server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from ppo_rlhf.core.addresses import without_secrets

STORE_ERRORS = (MlflowException, SQLAlchemyError, OSError)
"""The exceptions of a tracking store that cannot be read or written."""


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Limit requests to a tracking server to one retry and 5 seconds per attempt within the block.

    MLflow's default timeout is 120 seconds for each attempt.
    """
    limits = {MLFLOW_HTTP_REQUEST_MAX_RETRIES: 1, MLFLOW_HTTP_REQUEST_TIMEOUT: 5}
    before = {variable: variable.get_raw() for variable in limits}
    for variable, limit in limits.items():
        variable.set(min(limit, variable.get()))
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                variable.unset()
            else:
                variable.set(value)


def one_line(error: Exception) -> str:
    """Return a tracking store error's text in one line, without passwords and without SQLAlchemy's SQL statement, link
    and hint.
    """
    text = re.split(r"\n\s*[\[(](?:SQL|Background)", str(error))[0]
    text = re.sub(r"^\(raised as a result of Query-invoked autoflush;[^)]*\)", "", text)
    return without_secrets(" ".join(text.split()))
