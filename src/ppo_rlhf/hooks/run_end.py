"""Describes the end of a run that failed or was stopped: the reason, the last checkpoint and the command to resume."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import psutil

from ppo_rlhf.core.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    ModelError,
    TrackingStoreError,
    TrainingError,
    project_error,
)
from ppo_rlhf.runtime.paths import readable_path
from ppo_rlhf.runtime.processes import process_count

ERROR = "error"
LAST_CHECKPOINT = "last_checkpoint"
END_TAGS = frozenset({ERROR, LAST_CHECKPOINT})
"""MLflow tags of an interrupted run. Resuming the run deletes the tags."""
MOST_TEXT = 500


def end_tags(error: BaseException, checkpoints: Path | None, project_path: Path) -> dict[str, str]:
    """Return the MLflow tags with the error and with the last (good) checkpoint's path relative to the project."""
    last = None if checkpoints is None else last_checkpoint(error, checkpoints)
    why = f"{type(error).__name__}: {error}"[:MOST_TEXT]
    return {ERROR: why, **({} if last is None else {LAST_CHECKPOINT: readable_path(last, project_path)})}


def resume_hint(error: BaseException, checkpoints: Path, project_path: Path, *, is_sweep: bool = False) -> str:
    """Return the log message that names the last checkpoint and, if resuming makes sense, the command to resume.

    A sweep has no checkpoints, but a resumed sweep does not repeat the trainings that it finished.
    """
    last, own = last_checkpoint(error, checkpoints), project_error(error)
    if not isinstance(own, DivergenceError):
        where = "There is no checkpoint yet, so the interrupted stage begins again"
        where = "Finished trainings are kept" if is_sweep else where
        where = where if last is None else f"Last checkpoint: {readable_path(last, project_path)}"
        # A TrainingError without a cause comes from training itself; a cause means an error from outside training
        is_training = isinstance(own, TrainingError) and own.__cause__ is None
        is_given = isinstance(own, ConfigError | DataError | ModelError) and not isinstance(own, TrackingStoreError)
        if is_training or is_given:
            again = "The same models, data and settings would fail again"
            return f"{where}. {again}; docs/resume.md says what a resumed run may change."
        # The command to resume stands on a line of its own, so that a user can copy it
        return f"{where}.\nTo resume: {resume_command(sys.argv)}"
    where = (
        "No checkpoint is known to be good" if last is None else f"Last good one: {readable_path(last, project_path)}"
    )
    return f"{where}. With the same settings training would diverge again; see docs/resume.md, When training diverges."


def typed_command(typed: list[str]) -> list[str] | None:
    """Return the words of the typed `kedro run` or `ppo_rlhf run`, preceded by the words of torchrun or accelerate.

    `typed` is `sys.argv` as Kedro leaves it. Return None in a notebook or another program.
    """
    parts = Path(typed[0].removeprefix("python -m ")).parts[-2:]
    program = next((name for name in ("kedro", "ppo_rlhf") if name in parts), None)
    if typed[1:2] != ["run"] or program is None:
        return None
    python, *launcher = psutil.Process(os.getppid()).cmdline() if process_count() > 1 else [""]
    if launcher[1 - len(typed) :] != typed[1:]:
        return [program, *typed[1:]]
    return [Path(python).name, *launcher] if launcher[0] == "-m" else [Path(launcher[0]).name, *launcher[1:]]


def resume_command(typed: list[str]) -> str:
    """Return the typed command (`typed` is `sys.argv`) with `resume=latest`; in a notebook only the parameter."""
    if (command := typed_command(typed)) is None:
        return "resume=latest among the parameters"
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--params=") else [word])]
    if "--params" in words[:-1]:
        at = len(words) - words[::-1].index("--params")  # if --params is given several times, Kedro uses the last one
        words[at] = f"{re.sub(r'(^|,) *resume=[^,]*', '', words[at])},resume=latest".lstrip(", ")
        return shlex.join(words)
    return shlex.join([*words, "--params", "resume=latest"])


def last_checkpoint(error: BaseException, checkpoints: Path) -> Path | None:
    """Return the newest checkpoint. If training diverged, return the newest checkpoint that is known to be good."""
    from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name

    iterations = checkpoint_iterations(checkpoints)
    # Kedro wraps errors of datasets in its own errors, so look for an error of ppo_rlhf inside Kedro's error
    divergence = project_error(error)
    if isinstance(divergence, DivergenceError):
        iterations = [iteration for iteration in iterations if iteration <= divergence.last_good_iteration]
    return checkpoints / checkpoint_name(iterations[-1]) if iterations else None
