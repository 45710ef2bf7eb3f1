"""Copies of the project for tests that run it as a person does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Path]) -> Callable[[], Path]:
    """Return a function that makes a fresh copy of this project each time, in a folder of its own."""
    return lambda: new_project(tmp_path_factory.mktemp("copy") / "project")


@pytest.fixture(scope="session")
def chain(make_project: Callable[[], Path]) -> Run:
    """`kedro run --env test`, which nobody interrupted. Tests only read it."""
    project = make_project()
    finished = kedro_run(project, "--env", "test")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return Run(project, finished.stdout)
