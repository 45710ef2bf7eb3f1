"""Copies of the project for tests that run it as a person does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.interruptions import ARGUMENTS, Reference
from tests.integration.outcomes import Outcome
from tests.integration.processes import kedro_run


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Path]) -> Callable[[], Path]:
    """Return a function that makes a fresh copy of this project each time, in a folder of its own."""
    return lambda: new_project(tmp_path_factory.mktemp("copy") / "project")


@pytest.fixture(scope="session")
def reference(make_project: Callable[[], Path]) -> Reference:
    """The run that nobody interrupted, with how long everything in it took."""
    project = make_project()
    finished = kedro_run(project, *ARGUMENTS, watched=json.dumps({"note": str(project / "durations.json")}))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return Reference(Outcome.of(project), json.loads((project / "durations.json").read_text()))
