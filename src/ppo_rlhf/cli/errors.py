"""Which errors a person can mend, and how they read: one line each, without a traceback."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import click
from kedro.config import BadConfigException, MissingConfigException
from kedro.io import DatasetError
from kedro.utils import find_kedro_project
from kedro.validation import ParameterValidationError
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from ppo_rlhf.core.errors import own_error

CONFIGURATION = (OmegaConfBaseException, YAMLError, MissingConfigException, BadConfigException)
REQUEST = {  # what Kedro raises, as plain ValueErrors, where a command names things that do not exist
    "kedro.framework.session.session",
    "kedro.pipeline.pipeline",
    "kedro.runner.runner",
    "kedro.config.omegaconf_config",
}
CATALOG_ENTRY = "An exception occurred when parsing config for dataset"
STORAGE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_NO_MAPPING = re.compile(r"^- Parameter '([^']*)': Expected dict for dataclass \w+, got (\w+)$")
_A_MAPPING_IS_EXPECTED = r"\1: a mapping of settings (name: value) is expected, not \2"
_KEDRO_PREFIX = re.compile(r"^- Parameter '[^']*': (Failed to instantiate \w+ for parameter '[^']*': )?")


def one_line_each(error: Exception) -> list[str] | None:
    """Return the lines to show for an error, None if it is unexpected and its traceback is wanted."""
    ours = own_error(error)
    if isinstance(error, ParameterValidationError):
        lines = [line for line in str(error).splitlines() if line and line != "Parameter validation failed:"]
        return [_KEDRO_PREFIX.sub("", _NO_MAPPING.sub(_A_MAPPING_IS_EXPECTED, line)) for line in lines]
    if ours is not None:
        return str(ours).splitlines()
    if isinstance(error, ValidationError):
        return [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
    refused = _storage_error(error)
    if refused is not None:
        return [f"{refused.filename or str(error).partition(': ')[0]}: {refused.strerror}."]
    if isinstance(error, YAMLError) and isinstance(error.__cause__, MarkedYAMLError):
        return [_where_yaml_breaks(str(error), error.__cause__)]
    is_configuration = isinstance(error, CONFIGURATION) or (
        isinstance(error, DatasetError) and str(error).startswith(CATALOG_ENTRY)
    )
    is_request = isinstance(error, ValueError | KeyError) and _raised_in(error) in REQUEST
    return [" ".join(str(error).split())] if is_configuration or is_request else None


def _where_yaml_breaks(message: str, cause: MarkedYAMLError) -> str:
    """Return Kedro's message with the right place, which it counts from 0, and with the reason."""
    mark = cause.problem_mark
    if mark is None:
        return " ".join(message.split())
    file = message.partition(", unable to read")[0]
    hint = " (indent by spaces, not by tabs)" if "cannot start any token" in str(cause.problem) else ""
    return f"{file}, line {mark.line + 1}, column {mark.column + 1}: {cause.problem}{hint}"


def _storage_error(error: Exception) -> OSError | None:
    """Return why a dataset cannot be written or read, if the disk is full or a person lacks the right to it."""
    cause: BaseException | None = error if isinstance(error, DatasetError | OSError) else None
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in STORAGE):
        cause = cause.__cause__
    return cause


def _raised_in(error: Exception) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))


def project_here() -> Path:
    """Return the folder of the Kedro project that the working directory is in.

    Raises:
        click.ClickException: It is in none.
    """
    project_path: Path | None = find_kedro_project(Path.cwd())
    if project_path is None:
        raise click.ClickException(
            f"{Path.cwd()} is not in a Kedro project: change to the folder with pyproject.toml and conf/."
        )
    return project_path
