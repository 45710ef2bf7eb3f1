"""Fixtures that tests of all kinds share: copies of the project to run in, and MLflow kept out of the real one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

REPOSITORY = Path(__file__).parents[1]
TOY_PROJECT = Path(__file__).parent / "toy_project"

for name in ("KEDRO_ENV", "KEDRO_LOGGING_CONFIG", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
    os.environ.pop(name, None)
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # each pytest worker uses its share of the cores
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; processes started here inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.update(DO_NOT_TRACK="true", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    """Forget the lines that `say_once` logged in earlier tests of this process; the module is slow to load."""
    if lines := sys.modules.get("ppo_rlhf.runtime.log_lines"):
        lines.said.clear()


@pytest.fixture
def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], Path]:
    """Put a folder into a cache that is laid out as the hub's client does, under a name and a revision."""
    from ppo_rlhf.models.directories import hub_answers

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_answers.cache_clear()  # the stand-in for the hub of an earlier test may have answered

    def put(name: str, revision: str, commit: str) -> Path:
        cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (cached / "refs" / revision).write_text(commit * 40)
        return cached / "snapshots" / (commit * 40)

    return put


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables made and nothing in it; making one takes seconds, so the workers share it.

    It knows no experiment of the project: an experiment holds the absolute path of its artifacts.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose own folders are in one of the whole session
        folder = folder.parent
    database = folder / "mlflow.db"
    if not database.exists():
        temporary = folder / f"mlflow-{os.getpid()}.db"
        SqlAlchemyStore(f"sqlite:///{temporary}", str(folder / "artifacts")).engine.dispose()
        temporary.replace(database)
    return database


@pytest.fixture(scope="session")
def kedro_logging() -> None:
    """Kedro configures logging at its first import of a package, which would remove caplog's handler in a test."""
    from kedro.framework.project import LOGGING

    for package in ("ppo_rlhf", "toy_ppo"):
        LOGGING.set_project_logging(package)


@pytest.fixture
def no_mlflow_left_over() -> Iterator[None]:
    """Reset MLflow's global state after a test."""
    yield
    import mlflow

    while mlflow.active_run() is not None:
        mlflow.end_run("FAILED")
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri("")
    mlflow.tracking.fluent._active_experiment_id = None


@pytest.fixture(scope="session")
def new_project(migrated_database: Path) -> Callable[[Path], Path]:
    """Copy this project to a folder, without results or personal settings; its code is the installed package."""

    def copy(folder: Path) -> Path:
        shutil.copytree(REPOSITORY / "conf", folder / "conf", ignore=shutil.ignore_patterns("local"))
        shutil.copytree(REPOSITORY / "data" / "01_raw", folder / "data" / "01_raw")
        for name in ("pyproject.toml", ".telemetry"):
            shutil.copy(REPOSITORY / name, folder / name)
        for name in ("src", "conf/local"):
            (folder / name).mkdir()
        shutil.copy(migrated_database, folder / "mlflow.db")
        return folder

    return copy


@pytest.fixture
def project(
    tmp_path: Path, new_project: Callable[[Path], Path], kedro_logging: None, no_mlflow_left_over: None
) -> Path:
    """A copy of this project for one test."""
    return new_project(tmp_path / "project")


@pytest.fixture(scope="session")
def new_toy_project(migrated_database: Path, kedro_logging: None) -> Callable[[Path], Path]:
    """Copy the toy project to a folder: the real command, hooks, runner and MLflow settings around toy nodes."""

    def copy(folder: Path) -> Path:
        shutil.copytree(TOY_PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "conf" / "base" / "mlflow.yml", folder / "conf" / "base" / "mlflow.yml")
        shutil.copy(REPOSITORY / ".telemetry", folder / ".telemetry")
        shutil.copy(migrated_database, folder / "mlflow.db")
        return folder

    return copy


@pytest.fixture
def toy_project(tmp_path: Path, new_toy_project: Callable[[Path], Path], no_mlflow_left_over: None) -> Path:
    """A copy of the toy project for one test."""
    return new_toy_project(tmp_path / "toy")


@pytest.fixture(scope="session")
def kedro() -> Callable[..., Result]:
    """`kedro(project, "run", …)`: the command in this process, which spares each test the seconds of importing."""

    def invoke(project: Path, *arguments: str) -> Result:
        from kedro.framework.cli.cli import KedroCLI

        with contextlib.chdir(project):
            return CliRunner().invoke(KedroCLI(project), list(arguments))

    return invoke


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace and differentiate as inductor does, and run the graphs without making kernels of them."""
    import torch  # heavy, as are the two below
    from torch._dynamo.utils import counters

    from ppo_rlhf.passes import compilation

    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
