"""The end of a run that failed or was stopped: the reason, its last checkpoint, and the command that goes on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ppo_rlhf.core.errors import DivergenceError

ERROR = "error"
LAST_CHECKPOINT = "last_checkpoint"
END_TAGS = frozenset({ERROR, LAST_CHECKPOINT})
"""Tags of a run that was interrupted; a run that goes on loses them."""
MOST_TEXT = 500
COMMAND_OPTIONS = {  # of Kedro's run parameters
    "pipeline_names": "--pipelines",
    "tags": "--tags",
    "from_nodes": "--from-nodes",
    "to_nodes": "--to-nodes",
    "node_names": "--nodes",
    "from_inputs": "--from-inputs",
    "to_outputs": "--to-outputs",
    "namespaces": "--namespaces",
}


def end_tags(error: Exception, checkpoints: Path | None, project_path: Path) -> dict[str, str]:
    """Return the tags with the reason of the end and the last checkpoint, or the last good one.

    Args:
        error: The reason.
        checkpoints: The directory of the run's checkpoints; None if it has none.
        project_path: Paths are relative to it.
    """
    last = None if checkpoints is None else last_checkpoint(error, checkpoints)
    why = f"{type(error).__name__}: {error}"[:MOST_TEXT]
    return {ERROR: why, **({} if last is None else {LAST_CHECKPOINT: relative_to(last, project_path)})}


def way_to_go_on(error: Exception, checkpoints: Path, run_params: Mapping[str, Any]) -> str:
    """Return the line that names the last checkpoint and the command that goes on from it, if one can."""
    last, project_path = last_checkpoint(error, checkpoints), Path(run_params["project_path"])
    if _divergence(error) is None:
        where = "There is no checkpoint yet" if last is None else f"Last checkpoint: {relative_to(last, project_path)}"
        return f"{where}. To go on: {resume_command(run_params)}"
    again = "With the same settings training would diverge again"
    if last is None:
        return f"No checkpoint is known to be good. {again}."
    start = f"Last good checkpoint: {relative_to(last, project_path)}. {again}; a new run can start from its policy"
    policy = f"{relative_to(last, project_path)}/policy"
    if (last / "policy" / "adapter_config.json").is_file():
        return (
            f"{start}: merge the LoRA adapter {policy} into its base, as docs/resume.md shows under "
            '"When training diverges", and give the result as sft_model_path with --pipelines align.'
        )
    return f"{start}, sft_model_path={policy} with --pipelines align."


def resume_command(run_params: Mapping[str, Any]) -> str:
    """Return the command that goes on with a run: what was typed, with `resume=latest`.

    Kedro's run parameters lack `--conf-source`; the typed command has it.
    """
    words = ["kedro", "run"]
    if run_params.get("env"):
        words += ["--env", str(run_params["env"])]
    for name, option in COMMAND_OPTIONS.items():
        if run_params.get(name):
            words += [option, ",".join(run_params[name])]
    given = {**_flat(run_params.get("runtime_params") or {}), "resume": "latest"}
    words += ["--params", ",".join(f"{name}={value}" for name, value in given.items())]
    typed = click.get_current_context(silent=True)
    source = None if typed is None else typed.params.get("conf_source")
    return shlex.join(words + (["--conf-source", str(source)] if source else []))


def last_checkpoint(error: Exception, checkpoints: Path) -> Path | None:
    """Return the newest checkpoint; after training diverged, the newest whose state is known to be good."""
    from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name  # only a run pays for it

    iterations = checkpoint_iterations(checkpoints)
    divergence = _divergence(error)
    if divergence is not None:
        iterations = [iteration for iteration in iterations if iteration <= divergence.last_good_iteration]
    return checkpoints / checkpoint_name(iterations[-1]) if iterations else None


def relative_to(path: Path, project_path: Path) -> str:
    """Return a path as it is written in the project."""
    return str(path.relative_to(project_path) if path.is_relative_to(project_path) else path)


def _divergence(error: BaseException | None) -> DivergenceError | None:
    """Return the DivergenceError that `error` is or was caused by: Kedro wraps the errors of datasets."""
    while error is not None and not isinstance(error, DivergenceError):
        error = error.__cause__
    return error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = "null" if value is None else value
    return flat
