"""Processes other than the main process get the run from the main process, and track nothing."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline

from ppo_rlhf import settings
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import LaunchError
from ppo_rlhf.datasets import ResumeCheckpointDataset
from ppo_rlhf.hooks import ChecksHook, TrackingHook, WorkerHook
from ppo_rlhf.hooks.worker import RUN_ID, agree_on_run
from ppo_rlhf.runtime import paths, processes


def test_the_main_process_tells_the_run_and_its_checkpoint_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    told = []
    monkeypatch.setattr(paths.running, "project", None)  # restored afterwards
    monkeypatch.setenv(RUN_ID, "")  # restored afterwards
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    tells = ("run", tmp_path, tmp_path, "bfloat16")
    monkeypatch.setattr(processes, "from_main", lambda value: told.append(value) or tells)
    monkeypatch.setattr(processes, "from_all", lambda sees: [True, sees])
    agree_on_run(*tells)
    assert told == [tells]
    assert os.environ[RUN_ID] == "run"
    monkeypatch.setenv(RUN_ID, "")
    entry = ResumeCheckpointDataset(str(tmp_path), "latest")
    catalog = DataCatalog({"resume_checkpoint": entry, "params:ppo": MemoryDataset(PPOConfig())})
    WorkerHook().before_pipeline_run({"project_path": str(tmp_path), "env": None}, Pipeline([]), catalog)
    assert os.environ[RUN_ID] == "run"
    assert entry.load() == tmp_path
    assert catalog.load("params:ppo").dtype == "bfloat16"  # though auto would be float32 here


def test_nodes_without_a_shared_folder_are_refused_in_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lost = tmp_path / "run"
    monkeypatch.setattr(paths.running, "project", None)  # restored afterwards
    monkeypatch.setenv(RUN_ID, "")
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "from_main", lambda value: ("run", None, lost, None))
    monkeypatch.setattr(processes, "from_all", lambda sees: [True, sees])
    for process in (
        lambda: agree_on_run("run", None, lost),
        lambda: WorkerHook().before_pipeline_run(
            {"project_path": str(tmp_path), "env": None}, Pipeline([]), DataCatalog({})
        ),
    ):
        with pytest.raises(LaunchError, match=f"^process 1 .*{lost}: "):
            process()


def test_a_worker_process_logs_only_errors(monkeypatch: pytest.MonkeyPatch):
    levels = {name: logging.getLogger(name).level for name in ("kedro", "ppo_rlhf", "ppo_rlhf.runtime.processes")}
    try:
        WorkerHook().after_context_created(SimpleNamespace(config_loader=None))
        assert not logging.getLogger("ppo_rlhf.runner").isEnabledFor(logging.WARNING)
        assert logging.getLogger("ppo_rlhf.runtime.processes").isEnabledFor(logging.WARNING)  # the main process hangs
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def test_only_the_main_process_checks_and_tracks(monkeypatch: pytest.MonkeyPatch):
    assert [type(hook) for hook in settings.HOOKS[:2]] == [ChecksHook, TrackingHook]
    assert "kedro_mlflow" in settings.DISABLE_HOOKS_FOR_PLUGINS
    monkeypatch.setenv("RANK", "1")
    try:
        other = importlib.reload(settings)
        assert [type(hook) for hook in other.HOOKS] == [WorkerHook]
        assert {"kedro_mlflow", "kedro-viz", "kedro-telemetry"} <= set(other.DISABLE_HOOKS_FOR_PLUGINS)
    finally:
        monkeypatch.delenv("RANK")
        importlib.reload(settings)
