"""Finds MLflow's artifacts again after a project was moved or copied.

MLflow stores absolute paths of artifacts in its database, and has no command to change them: without `follow_artifacts`
a moved project would write its artifacts below its former place, and would not find those of its earlier runs.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

from mlflow.utils.file_utils import local_file_uri_to_path

from ppo_rlhf.hooks.tracking_store import ARTIFACTS, SQLITE, check_writable

COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
"""The tables and columns of MLflow's database that hold paths of artifacts."""

logger = logging.getLogger(__name__)


def follow_artifacts(uri: str, folder: str | None) -> None:
    """Correct the paths of artifacts in MLflow's sqlite file if the project's folder was moved or copied.

    Only artifacts beside the sqlite file, where `place_in_project` places them, are followed, and only if the former
    folder is gone, or the folder of one of the runs is there.

    Args:
        uri: The address of the tracking store.
        folder: The folder of artifacts that the settings name.

    Raises:
        ConfigError: The sqlite file cannot be written.
    """
    database = Path(uri.removeprefix(SQLITE))
    here = database.parent / ARTIFACTS
    if not uri.startswith(SQLITE) or folder != str(here) or not here.is_dir() or not database.is_file():
        return
    with closing(sqlite3.connect(database)) as connection, connection:
        for (location,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            former = Path(local_file_uri_to_path(location or ""))
            if former.name != ARTIFACTS or former == here:
                continue
            check_writable(database)
            begins = f"{location}/"
            uris = connection.execute("SELECT artifact_uri FROM runs").fetchall()
            runs = {text.removeprefix(begins).partition("/")[0] for (text,) in uris if text and text.startswith(begins)}
            if former.is_dir() and not any((here / run).is_dir() for run in runs):
                continue
            for old, new in ((str(former), str(here)), (former.as_uri(), here.as_uri())):
                for table, column in COLUMNS:
                    connection.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                        f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                        (new, len(old) + 1, old, len(old) + 1, f"{old}/"),
                    )
            logger.info("The project was moved: MLflow's artifacts are in %s now, formerly in %s.", here, former)
