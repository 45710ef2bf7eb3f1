"""The project that a command works on (folder, settings, recorded runs), and the parser of the option `--params`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import mlflow
from kedro.framework.cli.utils import _split_params
from kedro.framework.session import KedroSession
from kedro.utils import find_kedro_project
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from mlflow import MlflowClient

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.hooks.tracking_store import SQLITE, store_errors_as_config_errors
from ppo_rlhf.runtime.names import env_option


def project_here() -> Path:
    """Return the folder of the Kedro project that the working directory is in.

    Raises:
        click.ClickException: The working directory is not in a Kedro project.
    """
    project_path: Path | None = find_kedro_project(Path.cwd())
    if project_path is None:
        raise click.ClickException(
            f"{Path.cwd()} is not in a Kedro project: change to the folder with pyproject.toml and conf/."
        )
    return project_path


def context_here(env: str | None, params: dict[str, Any] | None = None) -> Any:
    """Return Kedro's context of the project that the working directory is in."""
    session: Any = KedroSession.create(project_here(), env=env, runtime_params=params)
    return session.load_context()


def existing_store(settings: KedroMlflowConfig, env: str | None) -> str:
    """Return the tracking store's URI; raise PPORLHFError if its sqlite file is missing (MLflow would create it)."""
    uri = settings.server.mlflow_tracking_uri or mlflow.get_tracking_uri()
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file():
        command = f"`kedro run{env_option(env)}` creates it"
        raise PPORLHFError(f"There is no run yet: {uri.removeprefix(SQLITE)} does not exist. {command}.")
    return uri


@contextmanager
def recorded_runs(env: str | None) -> Iterator[tuple[MlflowClient, str]]:
    """Yield a client of the project's tracking store, and the name of the project's experiment.

    Raises:
        ConfigError: The tracking store fails within the `with` block.
    """
    settings = context_here(env).mlflow
    uri = existing_store(settings, env)
    with store_errors_as_config_errors(f"The run cannot be read from the tracking store {without_secrets(uri)}"):
        yield MlflowClient(uri), settings.tracking.experiment.name


def _as_items(match: re.Match[str]) -> str:
    return "=" + "\n".join(f"- {item}" for item in match[1].split(","))


def split_params(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return the settings of `--params`, where `name=[1,2]` is a list.

    Kedro splits the text of `--params` at commas, so a list is rewritten as YAML items on lines of their own before
    Kedro parses it.
    """
    if isinstance(value, str):
        value = re.sub(r"=\[([^\[\]]*,[^\[\]]*)\]", _as_items, value)
    return _split_params(context, option, value)
