"""Where a run came from, as MLflow tags: code, data, versions, environment."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

PACKAGES = ("ppo_rlhf", "kedro", "mlflow", "torch", "transformers", "trl")


def git_tags(project_path: Path) -> dict[str, str]:
    """Return the commit that the project's folder is at and whether files differ from it; nothing outside a repository.

    MLflow's own tag for the commit needs GitPython, and means the folder of the command that was typed.
    """
    commit = _git(project_path, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _git(project_path, "status", "--porcelain", "--untracked-files=no")
    return {"git.commit": commit, "git.dirty": str(bool(changes)).lower()}


def version_tags() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    versions = {f"version.{name}": importlib.metadata.version(name) for name in PACKAGES}
    return {"version.python": platform.python_version(), **versions}


def input_tags(pipeline: Pipeline, catalog: CatalogProtocol) -> dict[str, str]:
    """Return path and fingerprint of everything that the pipeline reads and does not make itself."""
    from ppo_rlhf.datasets.fingerprints import origin  # heavy: only a run pays for it

    tags: dict[str, str] = {}
    for name in sorted(pipeline.inputs()):
        if name == "parameters" or name.startswith("params:"):
            continue
        source, fingerprint = origin(catalog.get(name))
        if source is not None:
            tags[f"data.{name}.path"] = source
        if fingerprint is not None:
            tags[f"data.{name}.fingerprint"] = fingerprint
    return tags


def function_tags(groups: Mapping[str, Any], project_path: Path) -> dict[str, str]:
    """Return path and fingerprint of each file of the project that holds a function which the settings name."""
    from ppo_rlhf.datasets.fingerprints import Fingerprints, functions_in, source_file

    contents, project = Fingerprints(), project_path.resolve()
    values = [
        dataclasses.asdict(group) if dataclasses.is_dataclass(group) and not isinstance(group, type) else group
        for group in groups.values()
    ]
    tags: dict[str, str] = {}
    for reference in functions_in(values):
        file = source_file(reference, project)
        if file is not None and project in file.resolve().parents and "site-packages" not in file.parts:
            module = reference.partition(":")[0]
            tags |= {f"data.{module}.path": str(file), f"data.{module}.fingerprint": contents.path(file)}
    return tags


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
