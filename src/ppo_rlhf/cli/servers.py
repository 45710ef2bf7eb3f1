"""The commands of plugins that start servers: `kedro mlflow ui`, which ends its server, and `kedro viz run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import mlflow
from kedro_mlflow.framework.cli.cli import ui
from kedro_viz.launchers.cli.run import run as viz_run

from ppo_rlhf.cli.errors import with_one_line_errors
from ppo_rlhf.cli.project import context_here
from ppo_rlhf.hooks.moved_artifacts import follow_artifacts
from ppo_rlhf.hooks.viz_status import read_status_of

PATIENCE_S = 5.0
"""Seconds that a server may take to end after a signal, before it is killed."""


def adapt_servers() -> None:
    """Let the plugins' commands call the functions of this module."""
    ui.callback = lambda **options: with_one_line_errors(_mlflow_ui, **options)
    assert viz_run.callback is not None
    show = viz_run.callback
    viz_run.callback = lambda **options: _viz_run(show, **options)


def _mlflow_ui(env: str, port: str | None, host: str | None) -> None:
    """Serve MLflow's pages until a signal comes, and end the server's processes with this one.

    kedro-mlflow's command leaves them on the port after SIGTERM, because MLflow's server has processes of its own.
    """
    settings = context_here(env).mlflow
    uri = settings.server.mlflow_tracking_uri or mlflow.get_tracking_uri()
    if uri.startswith("http"):
        click.launch(uri)
        return
    follow_artifacts(uri, settings.tracking.experiment.create_experiment_kwargs.artifact_location)
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    command += ["--host", host or settings.ui.host, "--port", port or settings.ui.port]
    sys.exit(run_together(command))


def run_together(command: list[str]) -> int:
    """Run a server until it ends or a signal comes to this process, and end all processes that it has started.

    Returns:
        The server's exit code.
    """
    server = subprocess.Popen(command, start_new_session=True)
    try:
        return server.wait()
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server, which leads a group of processes."""
    try:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    except ProcessLookupError:
        return
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _viz_run(show: Callable[..., Any], **options: Any) -> Any:
    """Show the status of the runs of the environment that `--env` names."""
    from kedro_viz import server

    # Kedro-Viz imports this function when it starts its server's process, which imports `serve` from this module
    server.run_server = serve
    return show(**options)


def serve(**options: Any) -> None:
    """Run Kedro-Viz's server, in a process of its own."""
    from kedro_viz import server

    if options["project_path"] is not None:
        read_status_of(options["env"], options["project_path"])
    server.run_server(**options)
