"""The servers of the plugins' commands: they end with their command, and show the status of the named environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlflow
import psutil
import pytest
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig

from ppo_rlhf.cli import servers
from ppo_rlhf.hooks.viz_status import read_status_of, status_folder, write_status_of

SERVER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(worker.pid, flush=True)
worker.wait()
"""
COMMAND = f"""
import sys
from ppo_rlhf.cli.errors import with_one_line_errors
from ppo_rlhf.cli.servers import run_together
with_one_line_errors(run_together, [sys.executable, "-c", {SERVER!r}])
"""


@pytest.mark.slow
def test_sigterm_to_the_command_ends_the_server_with_the_processes_that_it_has_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as command:
        assert command.stdout is not None
        worker = psutil.Process(int(command.stdout.readline()))
        server = worker.parent()
        assert server is not None
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(30) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs([worker, server], 10)
        assert alive == []


def test_each_environment_has_a_status_of_its_own_in_kedro_viz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedro_viz.api.rest.responses import run_events
    from kedro_viz.integrations.kedro import run_hooks

    for module, name in ((run_events, "PIPELINE_EVENT_FULL_PATH"), (run_hooks, "write_events")):
        monkeypatch.setattr(module, name, getattr(module, name))  # which is put back after the test
    (tmp_path / "pyproject.toml").write_text("[tool.kedro]\n")
    monkeypatch.chdir(tmp_path)
    for env in (None, "demo"):
        write_status_of(env)
        hook = run_hooks.PipelineRunStatusHook()
        hook._add_event({"event": "after_pipeline_run", "timestamp": f"{env}"}, flush=True)
    for env, wanted in ((None, "None"), ("local", "None"), ("demo", "demo"), ("other", None)):
        read_status_of(env, tmp_path)
        file = run_events.PIPELINE_EVENT_FULL_PATH
        assert file.parent == tmp_path / status_folder(env)
        assert (json.loads(file.read_text())[0]["timestamp"] if file.exists() else None) == wanted


@pytest.mark.parametrize("typed", [None, "sqlite:///other.db"])
def test_the_pages_are_those_of_the_store_that_the_run_used(
    typed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run(command: list[str]) -> int:
        started.append(command)
        return 3

    settings = KedroMlflowConfig(server={"mlflow_tracking_uri": typed})
    monkeypatch.setattr(servers, "context_here", lambda _: SimpleNamespace(mlflow=settings))
    monkeypatch.setattr(servers, "run_together", run)
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: "sqlite:///of_the_environment.db")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="3"):
        servers._mlflow_ui("local", None, None)
    [command] = started
    assert command[:4] == [sys.executable, "-m", "mlflow", "ui"]  # also where no environment is activated
    assert command[command.index("--backend-store-uri") + 1] == (typed or "sqlite:///of_the_environment.db")


def test_the_exit_code_is_the_servers() -> None:
    assert servers.run_together([sys.executable, "-c", "raise SystemExit(3)"]) == 3
