"""What a run is, as MLflow gets to know it: its hyperparameters as params, where it came from as tags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.hooks.hyperparameters import changed_settings, hyperparameters, parameter_groups
from ppo_rlhf.hooks.provenance import function_tags, git_tags, input_tags, version_tags

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


@dataclass(frozen=True)
class RunDescription:
    """A run as MLflow records it.

    Attributes:
        params: Every hyperparameter as text, named `group.key`.
        tags: Pipeline, environment, seed, code, versions, data.
        groups: The parameter groups as the nodes get them.
    """

    params: dict[str, str]
    tags: dict[str, str]
    groups: dict[str, Any]


def describe_run(run_params: Mapping[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> RunDescription:
    """Return what is known of a run before its first node; reads its inputs for their fingerprints."""
    groups = parameter_groups(pipeline, catalog)
    seed = next((group.seed for group in groups.values() if hasattr(group, "seed")), None)
    changed = ", ".join(f"{name}={value}" for name, value in changed_settings(groups).items())
    tags = {
        "pipeline": ",".join(pipeline_names(run_params)),
        "environment": run_params["env"] or "local",
        **({} if seed is None else {"seed": str(seed)}),
        **({"ppo.not_default": changed} if changed else {}),
        **git_tags(Path(run_params["project_path"])),
        **version_tags(),
        **input_tags(pipeline, catalog),
        **function_tags(groups, Path(run_params["project_path"])),
    }
    return RunDescription(hyperparameters(groups), tags, groups)


def pipeline_names(run_params: Mapping[str, Any]) -> list[str]:
    """Return the names of the pipelines that run, sorted: Kedro's command line gives them in any order."""
    return sorted(set(run_params["pipeline_names"] or ["__default__"]))


def resume_command(run_params: Mapping[str, Any], resume: str = "latest") -> str:
    """Return the command that goes on with a run: what was typed, with `resume`."""
    words = ["kedro", "run"]
    if run_params.get("env"):
        words += ["--env", str(run_params["env"])]
    for name, option in COMMAND_OPTIONS.items():
        if run_params.get(name):
            words += [option, ",".join(run_params[name])]
    given = {**_flat(run_params.get("runtime_params") or {}), "resume": resume}
    words += ["--params", ",".join(f"{name}={value}" for name, value in given.items())]
    return shlex.join(words)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = "null" if value is None else value
    return flat
