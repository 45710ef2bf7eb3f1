"""Which errors a person can mend, and how they read: one line each, without a traceback."""

from __future__ import annotations

import re

from kedro.config import BadConfigException, MissingConfigException
from kedro.io import DatasetError
from kedro.validation import ParameterValidationError
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from ppo_rlhf.runner.wrapped import own_error

CONFIGURATION = (OmegaConfBaseException, YAMLError, MissingConfigException, BadConfigException)
REQUEST = {  # what Kedro raises, as plain ValueErrors, where a command names things that do not exist
    "kedro.framework.session.session",
    "kedro.pipeline.pipeline",
    "kedro.runner.runner",
    "kedro.config.omegaconf_config",
}
CATALOG_ENTRY = "An exception occurred when parsing config for dataset"
_KEDRO_PREFIX = re.compile(r"^- Parameter '[^']*': (Failed to instantiate \w+ for parameter '[^']*': )?")


def one_line_each(error: Exception) -> list[str] | None:
    """Return the lines to show for an error, None if it is unexpected and its traceback is wanted."""
    ours = own_error(error)
    if isinstance(error, ParameterValidationError):
        lines = str(error).splitlines()
        return [_KEDRO_PREFIX.sub("", line) for line in lines if line and line != "Parameter validation failed:"]
    if ours is not None:
        return str(ours).splitlines()
    if isinstance(error, ValidationError):
        return [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
    is_configuration = isinstance(error, CONFIGURATION) or (
        isinstance(error, DatasetError) and str(error).startswith(CATALOG_ENTRY)
    )
    is_request = isinstance(error, ValueError | KeyError) and _raised_in(error) in REQUEST
    return [" ".join(str(error).split())] if is_configuration or is_request else None


def _raised_in(error: Exception) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))
