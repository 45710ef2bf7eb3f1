"""The run that `resume` names, as far as the disk alone can tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ppo_rlhf.checkpoints.files import MANIFEST, checkpoint_iterations
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.datasets.resume_checkpoint import LATEST

MOST_LISTED = 3
_RUN_ID = re.compile(r"[\w-]+")


class NamedRun(NamedTuple):
    """A run that a person named by its MLflow run id or by one of its checkpoints; None means its newest one."""

    run_id: str
    checkpoint: Path | None = None


def find_named(requested: str, root: Path, project_path: Path) -> NamedRun:
    """Return the run that a checkpoint's directory, a run's directory or an MLflow run id names. Nothing is written.

    Args:
        requested: The value of `resume`; a path is relative to the project, or else to the working directory.
        root: Holds the checkpoints of all runs.
        project_path: The project's directory.

    Raises:
        ConfigError: There is no such checkpoint or run, or it lies elsewhere.
    """
    if _RUN_ID.fullmatch(requested) and (root / requested).is_dir():
        return NamedRun(requested)
    given, home = Path(requested).expanduser(), root.resolve()
    path = next((place.resolve() for place in (project_path / given, given.absolute()) if place.is_dir()), None)
    if path is None:
        runs = sorted(
            (run for run in root.glob("*") if checkpoint_iterations(run)), key=lambda run: -run.stat().st_mtime
        )
        newest = ", ".join(run.name for run in runs[:MOST_LISTED])
        hint = (
            f"The newest runs there: {newest}. Or give resume={LATEST}." if runs else "Leave out resume to start one."
        )
        raise ConfigError(
            f"resume={requested}: there is no such checkpoint, and no run of that id below {root}. {hint}"
        )
    if path.parent == home:
        return NamedRun(path.name)
    if path.parent.parent == home:
        return NamedRun(path.parent.name, root / path.parent.name / path.name)
    by_trainer = " One of PPOTrainer: train(resume_from_checkpoint=…)." if (path / MANIFEST).is_file() else ""
    raise ConfigError(
        f"resume={requested}: not a checkpoint below {root}. Give {root}/<MLflow run id>/iteration_NNNNNN.{by_trainer}"
    )
