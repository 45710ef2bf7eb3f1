"""`kedro advise`: what to change first, from the settings and curves of a run in MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import mlflow
from kedro.framework.session import KedroSession
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from mlflow import MlflowClient

from ppo_rlhf.cli.errors import Command, project_here
from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.hooks.tracking_store import SQLITE, store_errors_as_config_errors, without_password


@click.command(cls=Command)
@click.option("--run", "run_id", metavar="ID", help="The MLflow run; without it the project's newest that trained.")
@click.option("--all", "everything", is_flag=True, help="Show all advice, not only what comes first.")
@click.option("--env", "-e", help="Kedro's environment, if its mlflow.yml names another tracking store.")
def advise(run_id: str | None, everything: bool, env: str | None) -> None:
    """Say what to change first after a run of PPO, in the order of tuning: KL, then learning rates and batch sizes,
    then epochs and clipping. docs/tuning.md has every rule.
    """
    for line in _lines(project_here(), run_id, everything, env):
        click.echo(line)


def existing_store(settings: KedroMlflowConfig) -> str:
    """Return the tracking store's URI; raise PPORLHFError if it is a file that is not there. MLflow would make one."""
    uri = settings.server.mlflow_tracking_uri or mlflow.get_tracking_uri()
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file():
        raise PPORLHFError(f"There is no run yet: {uri.removeprefix(SQLITE)} does not exist. `kedro run` makes it.")
    return uri


def _lines(project_path: Path, run_id: str | None, everything: bool, env: str | None) -> list[str]:
    from ppo_rlhf.advice import SHOWN, in_words
    from ppo_rlhf.cli.recorded_run import newest_run, recorded_run  # heavy: other commands do not wait for them

    session: Any = KedroSession.create(project_path, env=env)
    with session:
        settings = session.load_context().mlflow
    uri = existing_store(settings)
    with store_errors_as_config_errors(f"The run cannot be read from the tracking store {without_password(uri)}"):
        client = MlflowClient(uri)
        run = recorded_run(client, run_id or newest_run(client, settings.tracking.experiment.name))
    return [*run.heading, *in_words(run.config, run.history, most=None if everything else SHOWN)]
