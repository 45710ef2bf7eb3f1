"""The file in which Kedro-Viz keeps the status of the last run, one for each environment.

Kedro-Viz has one file for all environments, so that `kedro viz run --env demo` would show the status of a run with
another environment's settings and data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kedro_viz import constants


def status_folder(env: str | None) -> Path:
    """Return the folder of the status in the project: `.viz` without an environment, else a folder in it."""
    folder = Path(constants.VIZ_METADATA_DIR)
    return folder if env in (None, "local") else folder / str(env)


def write_status_of(env: str | None) -> None:
    """Let Kedro-Viz's hook of this process write the status of a run with the environment `env`."""
    from kedro_viz.integrations.kedro import hooks_utils, run_hooks

    run_hooks.write_events = partial(hooks_utils.write_events, events_dir=str(status_folder(env)))


def read_status_of(env: str | None, project_path: Path) -> None:
    """Let Kedro-Viz's server in this process read the status of the last run with the environment `env`."""
    from kedro_viz.api.rest.responses import run_events

    file = Path(project_path) / status_folder(env) / constants.PIPELINE_EVENTS_FILENAME
    run_events.PIPELINE_EVENT_FULL_PATH = file
