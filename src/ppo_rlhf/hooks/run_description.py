"""Describes a run for MLflow: each hyperparameter as a param, and code, data and versions as tags."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from kedro.io import CatalogProtocol, DatasetError
from kedro.pipeline import Pipeline
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.hooks.run_end import typed_command
from ppo_rlhf.hooks.run_name import run_name
from ppo_rlhf.runtime.manifests import sha256_of
from ppo_rlhf.runtime.names import POLICY, SET
from ppo_rlhf.runtime.paths import below_project, path_of
from ppo_rlhf.runtime.processes import process_count

PREFIX = "params:"
DTYPE = "ppo.dtype"
PROJECT_PATH = "project_path"
INPUT_PATH = re.compile(r"data\..+\.path")
"""The tags with the path of an input, or its name on the hub."""
PROCESSES = "launch.processes"
"""The tag with the number of a run's processes."""
DIGITS = 8  # number of digits of a fingerprint to log: MLflow allows 36, but 36 digits are too long for MLflow's pages
UNLOGGED = (
    *("session_id", "run_id", "env", "kedro_version", "pipeline_name", "pipeline_names", "is_async"),
    *("only_missing_outputs", "runner", "runtime_params"),
)
"""Kedro's parameters of a run that are no tags: other tags have what they say, or nobody looks for it, and MLflow's
page may show all tags above the verdict."""
VERSIONS = "versions"
"""The tag with the versions of Python and of `PACKAGES`, as `<name> <version>, …`."""
PACKAGES = ("ppo_rlhf", "kedro", "mlflow", "torch", "transformers", "trl")
FUNCTION = re.compile(r'(?:^|")([A-Za-z_][\w.]*):[A-Za-z_]\w*(?:$|")')
"""A text `module:name`, by which parameters name a Python function."""
_DATA = re.compile(r"data\.(raw_\w+)\.fingerprint")
MODELS = {"sft_model_path": "sft_policy", "reward_model_path": "reward_model"}
"""Fields of PPOConfig that the pipeline leaves null, each with the catalog entry that the pipeline reads instead."""


def functions_in(value: Any) -> list[str]:
    """Return the modules of the Python functions that a parameter's value names."""
    return FUNCTION.findall(as_text(value))


@dataclass(frozen=True)
class RunDescription:
    """The name, the params and the tags of a run, without the passwords and tokens of addresses."""

    params: dict[str, Any]  # values of the parameters as JSON has them, by `group.key`
    tags: dict[str, str]
    name: str = ""
    chosen_here: frozenset[str] = frozenset()  # names of parameters set to `auto`, whose values depend on the machine

    @property
    def texts(self) -> dict[str, str]:
        """The params as texts, as MLflow stores them."""
        return {name: as_text(value) for name, value in self.params.items()}


def describe_run(run_params: Mapping[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> RunDescription:
    """Return the description of a run before its first node runs. The run's inputs are read to compute fingerprints."""
    from ppo_rlhf.preflight import RunRequest

    project_path = Path(run_params["project_path"])
    names = {name.removeprefix(PREFIX).split(".")[0] for name in pipeline.inputs() if name.startswith(PREFIX)}
    groups = {name: parameter(catalog, name) for name in sorted(names)}
    ppo: Any = groups.get("ppo")
    chosen_here = frozenset[str]()
    if isinstance(ppo, PPOConfig):
        from ppo_rlhf.ppo.precision import with_dtype

        groups["ppo"] = with_dtype(ppo)
        chosen_here = frozenset({DTYPE} if groups["ppo"] is not ppo else ())
    params = {name: value for group, values in groups.items() for name, value in flattened(group, values).items()}
    seed = next((group.seed for group in groups.values() if hasattr(group, "seed")), None)
    changed = ppo.not_default() if hasattr(ppo, "not_default") else {}
    unused = RunRequest(pipeline, catalog, project_path).unused - {"training_prompts"}  # which a node counts
    inputs = _input_tags(sorted(pipeline.inputs() - unused), catalog)
    inputs |= _reward_model_tags(groups.get("reward"), project_path)
    for setting, model in MODELS.items():
        if f"ppo.{setting}" in params and params[f"ppo.{setting}"] is None and model not in unused:
            params[f"ppo.{setting}"] = inputs.get(f"data.{model}.path") or str(path_of(catalog.get(model)))
    command = typed_command(sys.argv)
    given = _given(run_params)
    # Log the other parameters of the run as tags, under the names that kedro-mlflow gives them.
    logged = {name: value for name, value in run_params.items() if value and name not in UNLOGGED}
    tags = {name: _tag(value)[:MAX_TAG_VAL_LENGTH] for name, value in logged.items()}
    if given:
        tags[SET] = given
    if command is not None:
        tags["kedro_command"] = shlex.join(command)
    if seed is not None:
        tags["seed"] = str(seed)
    if changed:
        tags["ppo.not_default"] = ", ".join(f"{name}={value}" for name, value in changed.items())
    tags |= {
        "pipeline": ",".join(pipeline_names(run_params)),
        "environment": run_params["env"] or "local",
        "host": platform.node(),
        PROCESSES: str(process_count()),
        **_git_tags(project_path),
        VERSIONS: ", ".join([f"python {platform.python_version()}", *map(_versioned, PACKAGES)]),
        **inputs,
        **_function_tags(params, project_path),
    }
    model = next((name for name in (POLICY, "base_model") if name in pipeline.inputs() - unused), "sft_policy")
    name = run_name(given, pipeline_names(run_params), path_of(catalog.get(model)))
    tags = {key: without_secrets(text) for key, text in tags.items()}
    return RunDescription(_masked(params), tags, without_secrets(name), chosen_here)


def _given(run_params: Mapping[str, Any]) -> str:
    """Return the settings given on the command line, without paths, such as `kl_coef=0.1 seed=2`."""
    given = (run_params.get("runtime_params") or {}).items()
    values = [each for group, values in given if group != "resume" for each in flattened(group, values).items()]
    named = [(name.rpartition(".")[2], value) for name, value in values if not name.endswith("_path")]
    return " ".join(f"{name}={as_text(value)}" for name, value in named)


def _tag(value: Any) -> str:
    """Return a tag's value: a text unchanged, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _versioned(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def verdict_of(summary: Mapping[str, Any]) -> str:
    """Return the verdict, the win rate, a change of the perplexity and a stop of `compare_policies` in a few sentences.

    The sentences describe a run or a model version.
    """
    from ppo_rlhf.reporting.wording import say_perplexity, say_stop, say_verdict

    win_rate = f"win rate {100 * summary['eval/win_rate']:.1f} %"
    return f"{say_verdict(summary['verdict'])} ({win_rate}).{say_perplexity(summary)}{say_stop(summary)}"


def log_inputs(this: RunDescription) -> None:
    """Log the files of prompts, demonstrations and preferences as datasets of the active MLflow run."""
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.data.sources import LocalArtifactDatasetSource  # type: ignore[attr-defined]  # created at import

    for tag, digest in this.tags.items():
        data = _DATA.fullmatch(tag)
        if data is not None:
            source = LocalArtifactDatasetSource(this.tags[f"data.{data[1]}.path"])
            context = "evaluation" if data[1] in ("raw_evaluation_prompts", "raw_reference_texts") else "training"
            dataset = MetaDataset(source, name=data[1], digest=digest[:DIGITS])  # type: ignore[abstract]
            mlflow.log_input(dataset, context)


def pipeline_names(run_params: Mapping[str, Any]) -> list[str]:
    """Return the names of the pipelines that run, sorted because Kedro's command line gives them in random order."""
    return sorted(set(run_params["pipeline_names"] or ["__default__"]))


def parameter(catalog: CatalogProtocol, name: str) -> Any:
    """Return a parameter or parameter group, or None if it is missing. Unlike `catalog.load`, log nothing."""
    try:
        dataset = catalog.get(f"{PREFIX}{name}")
        return None if dataset is None else dataset.load()
    except DatasetError:
        return None


def settle_dtype(catalog: CatalogProtocol, began_with: str | None = None) -> None:
    """Replace `ppo.dtype=auto` in a run's parameters by a precision.

    A resumed run keeps the precision that it began with (`began_with`); a new run gets the precision that suits the
    machine.
    """
    ppo = parameter(catalog, "ppo")
    if isinstance(ppo, PPOConfig):
        from ppo_rlhf.ppo.precision import with_dtype

        entry: Any = catalog.get(f"{PREFIX}ppo")
        entry.save(with_dtype(ppo, began_with))  # the dataset's own `save` writes no log line, unlike `catalog.save`


def flattened(group: str, values: Any) -> dict[str, Any]:
    """Return the entries of a group, defaults included, as JSON has them, keyed by `group.key`.

    If `values` is a single value rather than a group, the result is one entry with the key `group`.
    """
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    values = json.loads(json.dumps(values, default=str))
    return {f"{group}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {group: values}


def as_text(value: Any) -> str:
    """Return a parameter's value as MLflow stores it: lists and mappings as JSON, all else as Python prints it."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _masked(value: Any) -> Any:
    """Return a JSON value whose texts are without the passwords and tokens of addresses."""
    if isinstance(value, dict):
        return {key: _masked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def _git_tags(project_path: Path) -> dict[str, str]:
    """Return the project's commit and whether files differ from the commit; no tags outside a git repository.

    MLflow's own tag of the commit is not enough: MLflow takes the commit from the folder of the program.
    """
    command = ["git", "-C", str(project_path), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    answer = done.stdout.splitlines()
    commit = answer[0].removeprefix("# branch.oid ")
    return {"git.commit": commit, "git.dirty": str(any(line[0] != "#" for line in answer)).lower()}


def _input_tags(names: list[str], catalog: CatalogProtocol) -> dict[str, str]:
    """Return the path (or hub id) and the fingerprint of each input that the run reads and does not write itself.

    The fingerprint of a file is its SHA-256. The fingerprint of a model comes from its handle, which hashes the
    configuration and parts of the weights.
    """
    tags: dict[str, str] = {}
    for name in names:
        dataset: Any = None if name == "parameters" or name.startswith(PREFIX) else catalog.get(name)
        path = path_of(dataset)
        if path is None:
            continue
        tags[f"data.{name}.path"] = path
        # A dataset that holds a user's table computes the fingerprint of the table itself
        if hasattr(dataset, "fingerprint"):
            if (digest := dataset.fingerprint()) is not None:
                tags[f"data.{name}.fingerprint"] = digest
        elif Path(path).is_file():
            tags[f"data.{name}.fingerprint"] = sha256_of(Path(path))
        elif dataset.exists() and hasattr(handle := dataset.load(), "fingerprint"):
            tags |= {f"data.{name}.path": handle.source, f"data.{name}.fingerprint": handle.fingerprint()}
            # Pin the model's version, because another run may write a newer version before this run reads the model.
            dataset.pinned = Path(handle.source)
    return tags


def _reward_model_tags(reward: Any, project_path: Path) -> dict[str, str]:
    """Return the path and the fingerprint of each reward model that a component of the reward names by its path."""
    named = {c.title: c.path for c in getattr(reward, "components", ()) if c.path is not None}
    if not named:
        return {}
    from ppo_rlhf.models.loading import PretrainedHandle

    tags: dict[str, str] = {}
    for title, path in named.items():
        handle = PretrainedHandle(below_project(path, project_path))
        tags |= {f"data.reward.{title}.path": handle.source, f"data.reward.{title}.fingerprint": handle.fingerprint()}
    return tags


def _function_tags(params: Mapping[str, str], project_path: Path) -> dict[str, str]:
    """Return the path and the fingerprint of each Python file of the project whose functions the settings name."""
    tags: dict[str, str] = {}
    for module in sorted({module for value in params.values() for module in functions_in(value)}):
        inner = Path(*module.split("."))
        modules = (root / inner for root in (project_path, project_path / "src"))
        files = (file for path in modules for file in (path.with_suffix(".py"), path / "__init__.py"))
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            tags |= {f"data.{module}.path": str(file), f"data.{module}.fingerprint": sha256_of(file)}
    return tags
