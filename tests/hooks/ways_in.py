"""Enter a Kedro project in each way, from a process in which MLflow may still send telemetry.

    python -m tests.hooks.ways_in PROJECT

Prints for each way the number of telemetry clients, and whether MLflow hides the tracking server's address. The command
comes last, because it is prepared where `ppo_rlhf.cli` is imported, which happens once.
"""

import os
import sys
from pathlib import Path

import mlflow.telemetry
from kedro.framework.startup import bootstrap_project
from mlflow.environment_variables import MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT


def server(project: Path) -> None:
    from fastapi.testclient import TestClient
    from kedro.server.http_server import create_http_server

    with TestClient(create_http_server(project)) as client:
        client.post("/run", json={"pipeline_names": ["no such pipeline"]})


def notebook(project: Path) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    os.chdir(project)
    InteractiveShell.instance().run_line_magic("load_ext", "kedro.ipython")


def viz(project: Path) -> None:
    """The command's own process of `kedro viz`; the project is then read without its hooks."""
    from kedro.framework.cli.cli import KedroCLI
    from kedro_viz.integrations.kedro.data_loader import load_data

    KedroCLI(project)
    load_data(project)


if __name__ == "__main__":
    project = Path(sys.argv[1])
    bootstrap_project(project)
    for way in (server, notebook, viz):
        for name in ("DO_NOT_TRACK", MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.name):
            os.environ.pop(name, None)
        mlflow.telemetry.set_telemetry_client()
        assert mlflow.telemetry.get_telemetry_client() is not None
        way(project)
        sends = mlflow.telemetry.get_telemetry_client() is not None
        print(f"{way.__name__}: telemetry {sends}, hidden {MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.get()}")
