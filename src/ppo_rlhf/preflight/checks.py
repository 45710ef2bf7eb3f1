"""All checks, in the order in which a person would want to hear of what they find."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline

from ppo_rlhf.preflight.functions import check_functions
from ppo_rlhf.preflight.models import check_critic, check_devices, check_models, check_protection
from ppo_rlhf.preflight.prompts import check_prompts, future_policy
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.preflight.tables import check_demonstrations, check_given_preferences

TABLES = ("raw_demonstrations", "raw_preferences", "raw_prompts", "raw_evaluation_prompts")


def find_problems(
    pipeline: Pipeline, catalog: CatalogProtocol, project_path: Path, data_root: str = "data"
) -> list[str]:
    """Return what would stop this run, or must not happen in it; one line each, empty if all is well.

    Reads inputs, writes nothing. Parameters in the catalog are already validated.

    Args:
        pipeline: The nodes that will run: only what they take from outside is checked.
        catalog: The run's catalog.
        project_path: The project's directory.
        data_root: The globals' `data_root`.
    """
    run = RunRequest(pipeline, catalog, project_path, data_root)
    check_slice(run)
    check_protection(run)
    tables = _tables(run)
    models = check_models(run)
    check_devices(run)
    check_critic(run, models)
    demonstrations = check_demonstrations(run, tables, models)
    check_given_preferences(run, tables, models)
    check_prompts(run, tables, future_policy(run, models, demonstrations))
    check_functions(run, tables)
    return run.problems


def check_slice(run: RunRequest) -> None:
    """Note inputs that no file holds: a slice starts behind the nodes that make them."""
    missing = sorted(name for name in run.pipeline.inputs() if _is_nowhere(run, name))
    if missing:
        run.problems.append(
            f"This run starts from {', '.join(missing)}, which no file holds: start from the nodes that make "
            f"{'it' if len(missing) == 1 else 'them'} (--from-nodes), or give {'it' if len(missing) == 1 else 'each'} "
            "an entry with a file in conf/local/catalog.yml."
        )


def _is_nowhere(run: RunRequest, name: str) -> bool:
    if name not in run.catalog:
        return True
    dataset = run.catalog[name]
    return isinstance(dataset, MemoryDataset) and not dataset.exists()


def _tables(run: RunRequest) -> dict[str, pd.DataFrame]:
    loaded = {name: run.load(name) for name in TABLES if run.reads(name)}
    return {name: frame for name, frame in loaded.items() if frame is not None}
