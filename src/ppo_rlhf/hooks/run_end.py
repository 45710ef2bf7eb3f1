"""What is said of a run that did not end well: why, its last checkpoint, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ppo_rlhf.core.errors import DivergenceError, own_error
from ppo_rlhf.hooks.run_description import resume_command

ERROR = "error"
LAST_CHECKPOINT = "last_checkpoint"
END_TAGS = frozenset({ERROR, LAST_CHECKPOINT})
"""Tags of a run that was interrupted; one that goes on loses them."""
MOST_TEXT = 500


def end_tags(error: Exception, checkpoints: Path | None, project_path: Path) -> dict[str, str]:
    """Return the tags that say why the run ended and which checkpoint is its last, or its last good one.

    Args:
        error: What ended it.
        checkpoints: The directory of its checkpoints; None if it has none.
        project_path: Paths are relative to it.
    """
    last = None if checkpoints is None else last_checkpoint(error, checkpoints)
    why = f"{type(error).__name__}: {error}"[:MOST_TEXT]
    return {ERROR: why, **({} if last is None else {LAST_CHECKPOINT: relative_to(last, project_path)})}


def way_to_go_on(error: Exception, checkpoints: Path, run_params: Mapping[str, Any]) -> str:
    """Return the line that says where the last checkpoint is, and how to go on from it: the command, if one can."""
    last, project_path = last_checkpoint(error, checkpoints), Path(run_params["project_path"])
    if isinstance(own_error(error), DivergenceError):
        return _way_from_divergence(last, project_path)
    if last is None:
        return f"There is no checkpoint yet. To go on: {_command(run_params)}"
    return f"Last checkpoint: {relative_to(last, project_path)}. To go on: {_command(run_params)}"


def _way_from_divergence(good: Path | None, project_path: Path) -> str:
    from ppo_rlhf.models.adapters import is_adapter  # heavy: needs torch

    again = "With the same settings training would diverge again"
    if good is None:
        return f"No checkpoint is known to be good. {again}."
    where = relative_to(good, project_path)
    policy = f"{where}/policy"
    start = f"Last good checkpoint: {where}. {again}; a new run can start from its policy"
    if is_adapter(good / "policy"):
        return (
            f"{start}: merge the LoRA adapter {policy} into its base, as docs/resume.md shows under "
            '"When training diverges", and give the result as sft_model_path with --pipelines align.'
        )
    return f"{start}, sft_model_path={policy} with --pipelines align."


def _command(run_params: Mapping[str, Any]) -> str:
    """Return the command that goes on; Kedro's run parameters lack `--conf-source`, the typed command has it."""
    typed = click.get_current_context(silent=True)
    source = None if typed is None else typed.params.get("conf_source")
    return resume_command(run_params) + (f" --conf-source {shlex.quote(str(source))}" if source else "")


def last_checkpoint(error: Exception, checkpoints: Path) -> Path | None:
    """Return the newest checkpoint; after training diverged, the newest whose state is known to be good."""
    from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name  # heavy: needs torch

    ours = own_error(error)
    iterations = checkpoint_iterations(checkpoints)
    if isinstance(ours, DivergenceError):
        iterations = [iteration for iteration in iterations if iteration <= ours.last_good_iteration]
    return checkpoints / checkpoint_name(iterations[-1]) if iterations else None


def relative_to(path: Path, project_path: Path) -> str:
    """Return a path as it is written in the project."""
    return str(path.relative_to(project_path) if path.is_relative_to(project_path) else path)
