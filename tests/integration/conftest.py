"""Copies of the project for tests that run it as a person does."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path) -> Callable[[], Path]:
    """Return a function that makes a fresh copy of this project, without results or personal settings."""
    numbers = itertools.count(1)

    def make() -> Path:
        copied = tmp_path_factory.mktemp(f"project_{next(numbers)}")
        shutil.copytree(REPOSITORY / "conf", copied / "conf", ignore=shutil.ignore_patterns("local"))
        shutil.copytree(REPOSITORY / "data/01_raw", copied / "data/01_raw")
        for name in ("pyproject.toml", ".telemetry"):
            shutil.copy(REPOSITORY / name, copied / name)
        for folder in ("src", "conf/local"):
            (copied / folder).mkdir(parents=True)
        shutil.copy(migrated_database, copied / "mlflow.db")
        return copied

    return make
