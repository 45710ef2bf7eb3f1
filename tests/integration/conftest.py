"""Copies of the project for tests that run it as a user does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Path]) -> Callable[[], Path]:
    """Return a function that makes a fresh copy of this project each time, in a folder of its own."""
    return lambda: new_project(tmp_path_factory.mktemp("copy") / "project")


@pytest.fixture(scope="session")
def chain(new_project: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`kedro run --env test`, which nobody interrupted, once for all of pytest's processes. Tests only read it.

    It also writes TensorBoard's file, which changes no other outcome.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    project, output = folder / "chain", folder / "chain.txt"
    with FileLock(folder / "chain.lock"):
        if not output.exists():
            finished = kedro_run(new_project(project), "--env", "test", "--params", "ppo.report_to=tensorboard")
            assert finished.returncode == 0, finished.stdout + finished.stderr
            output.write_text(finished.stdout)
    return Run(project, output.read_text())
