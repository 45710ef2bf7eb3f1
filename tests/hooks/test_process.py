"""What the project sets in the process that it runs in, in every way in which the project can be entered."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_rlhf.hooks.process import ShownRecord

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ways_in(new_toy_project: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ways_in")
    # Names by which MLflow recognises a test or a CI, in which MLflow sends nothing anyway
    tested = ("DO_NOT_TRACK", "PYTEST_", "CI", "GITHUB_", "MLFLOW_", "BUILD", "TRAVIS", "JENKINS", "TF_BUILD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tested)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hooks.ways_in", str(new_toy_project(folder / "toy"))],
        env={**environment, "HOME": str(folder), "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        cwd=folder,  # MLflow may write its database here
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["server", "notebook", "viz"])
def test_mlflow_sends_no_telemetry_and_prints_no_address_with_a_password(ways_in: list[str], way: str):
    assert f"{way}: telemetry False, hidden True" in ways_in


def test_a_traceback_in_the_log_shows_neither_passwords_nor_control_characters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging, "_logRecordFactory", ShownRecord)
    shown, logger = io.StringIO(), logging.getLogger("traceback")
    logger.addHandler(logging.StreamHandler(shown))
    try:
        raise OSError("http://me:secret@host \x1b[31m")
    except OSError:
        logger.exception("failed")
    assert shown.getvalue().splitlines()[-1] == r"OSError: http://***@host \x1b[31m"
