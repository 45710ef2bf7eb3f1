"""What `resume` names, as far as the disk alone can tell: whether it is there and whole, and whether the run trains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ppo_rlhf.checkpoints.files import MANIFEST, checkpoint_iterations, verify_checkpoint_of_run
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.datasets.resume_checkpoint import LATEST, ResumeCheckpointDataset
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.runner import plan_loop

RESUME_CHECKPOINT = "resume_checkpoint"
MOST_NAMED = 3
_RUN_ID = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class NamedRun:
    """A run that a person named, by its id or by one of its checkpoints.

    Attributes:
        run_id: In MLflow.
        checkpoint: The one that was named; None for the newest.
    """

    run_id: str
    checkpoint: Path | None = None


def check_resume(run: RunRequest) -> None:
    """Note a checkpoint or run that is not there or damaged, and a run without the loop that it could go on with."""
    entry = run.catalog.get(RESUME_CHECKPOINT)
    if not isinstance(entry, ResumeCheckpointDataset) or entry.requested in (None, LATEST):
        return
    if plan_loop(run.pipeline) is None:
        run.problems.append(
            f"resume={entry.requested}: nothing in this run trains by PPO, so there is nothing to go on with. Run the "
            "pipeline that was interrupted: --pipelines ppo or align, or none of both for the whole chain."
        )
        return
    with run.noting():
        named = find_named(str(entry.requested), entry.root, run.project_path)
        if named.checkpoint is not None:
            verify_checkpoint_of_run(named.checkpoint)


def find_named(requested: str, root: Path, project_path: Path) -> NamedRun:
    """Return the run that a checkpoint's directory, a run's directory or an MLflow run id names. Nothing is written.

    Args:
        requested: What the person gave; a path is taken from the project, or else from the working directory.
        root: Holds the checkpoints of all runs.
        project_path: The project's directory.

    Raises:
        ConfigError: There is no such thing, or it lies elsewhere.
    """
    if _RUN_ID.fullmatch(requested) and (root / requested).is_dir():
        return NamedRun(requested)
    given = Path(requested).expanduser()
    path = next((place for place in (project_path / given, given.absolute()) if place.is_dir()), None)
    if path is None:
        raise ConfigError(
            f"resume={requested}: there is no such checkpoint, and no run of that id below {root}. {_those_below(root)}"
        )
    path, home = path.resolve(), root.resolve()
    if path.parent == home:
        return NamedRun(path.name)
    if path.parent.parent != home:
        elsewhere = " One that PPOTrainer wrote goes on in PPOTrainer: train(resume_from_checkpoint=…)."
        raise ConfigError(
            f"resume={requested}: is not a checkpoint below {root}. Name its folder there, "
            f"{root / '<MLflow run id>' / 'iteration_NNNNNN'}.{elsewhere if (path / MANIFEST).is_file() else ''}"
        )
    return NamedRun(path.parent.name, root / path.parent.name / path.name)


def _those_below(root: Path) -> str:
    runs = [path for path in root.glob("*") if checkpoint_iterations(path)]
    if not runs:
        return "No run has a checkpoint there: leave out resume to start one."
    newest = sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)[:MOST_NAMED]
    return f"The newest there: {', '.join(path.name for path in newest)}. Or give resume={LATEST}."
