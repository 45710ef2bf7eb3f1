"""Errors that a user can mend, as one line each without a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from kedro.config import BadConfigException, MissingConfigException
from kedro.io import DatasetError
from kedro.utils import find_kedro_project
from kedro.validation import ParameterValidationError
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from yaml import MarkedYAMLError, YAMLError

from ppo_rlhf.core.errors import project_error
from ppo_rlhf.core.visible import visible

CONFIGURATION = (OmegaConfBaseException, YAMLError, MissingConfigException, BadConfigException)
CATALOG_ENTRY = ("An exception occurred when parsing config for dataset", "'load_versions' keys")
KEDRO_END = ".\n"
"""Stands between Kedro's own words and those of the error that a dataset raised."""
_KEDRO_PREFIX = re.compile(r"^- (Parameter '[^']*': Failed to instantiate \w+ for parameter '[^']*': )?")


def one_line_each(error: Exception) -> list[str] | None:
    """Return the lines to show for an error, None if it is unexpected and its traceback is wanted."""
    if isinstance(error, ParameterValidationError):
        _, *lines = str(error).splitlines()
        return [_KEDRO_PREFIX.sub("", line) for line in lines if line]
    ours = project_error(error)
    if ours is not None:
        return str(ours).splitlines()
    if isinstance(error, YAMLError) and isinstance(error.__cause__, MarkedYAMLError):
        file = str(error).partition(", unable to read")[0]  # Kedro counts lines from 0
        return [f"{file}: {_flat(error.__cause__)}"]
    if isinstance(error, DatasetError):
        system_error = next((c for c in _causes(error) if isinstance(c, OSError | SafetensorError)), None)
        if system_error is not None:  # a full disk, a folder without the right to write
            return [f"{str(error).partition(KEDRO_END)[0]}: {_flat(system_error)}"]
        return [_flat(error)] if str(error).startswith(CATALOG_ENTRY) else None
    return [_flat(error)] if isinstance(error, CONFIGURATION) or _is_refusal_of_kedro(error) else None


def show(lines: Callable[[], Iterable[str]]) -> None:
    """Print a command's lines, and an error that a user can mend as lines without a traceback."""
    try:
        for line in lines():
            click.echo(line)
    except Exception as error:
        problems = one_line_each(error)
        if problems is None:
            raise
        raise click.ClickException(visible("\nError: ".join(problems))) from None


def _is_refusal_of_kedro(error: Exception) -> bool:
    """Return whether Kedro itself raised a ValueError or KeyError: a command names something that does not exist."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    return isinstance(error, ValueError | KeyError) and raised_in.startswith("kedro.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())


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
