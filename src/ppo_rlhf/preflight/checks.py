"""All checks, in the order in which a person would want to hear of what they find."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from kedro.io import CatalogProtocol, MemoryDataset
from kedro.pipeline import Pipeline

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.datasets import PretrainedModelDataset, RecordsDataset, ResumeCheckpointDataset
from ppo_rlhf.preflight.functions import check_functions
from ppo_rlhf.preflight.model_options import check_model_options
from ppo_rlhf.preflight.models import (
    check_backbone,
    check_critic,
    check_devices,
    check_models,
    check_protection,
    reward_model_is_needed,
)
from ppo_rlhf.preflight.prompts import check_prompts, check_stop_tokens, future_policy
from ppo_rlhf.preflight.request import PROMPT_TABLES, RunRequest
from ppo_rlhf.preflight.resume import check_resume
from ppo_rlhf.preflight.tables import check_demonstrations, check_given_preferences, check_lengths

SEEN_TO_ELSEWHERE = (MemoryDataset, RecordsDataset, PretrainedModelDataset, ResumeCheckpointDataset)
TABLES = ("raw_demonstrations", "raw_preferences", *PROMPT_TABLES)


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
    check_resume(run)
    check_given(run)
    check_protection(run)
    tables = _tables(run)
    models = check_models(run)
    check_devices(run)
    check_critic(run, models)
    check_backbone(run, models)
    check_model_options(run, models)
    demonstrations = check_demonstrations(run, tables, models)
    check_given_preferences(run, tables, models)
    policy = future_policy(run, models, None if demonstrations is None else demonstrations[0])
    check_lengths(run, demonstrations, policy)
    check_stop_tokens(run, policy)
    check_prompts(run, tables, policy, models.get("reward_model"))
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
    for name in sorted(run.pipeline.inputs() - set(missing)):
        dataset = run.catalog[name]
        if not isinstance(dataset, SEEN_TO_ELSEWHERE) and not dataset.exists():
            run.problems.append(f"{run.source(name)}: nothing is there yet. Run the node that makes {name} first.")


def check_given(run: RunRequest) -> None:
    """Note inputs that a person set to null though the run cannot do without, and paths in a place that is not read."""
    needed = {
        "demonstrations_path": run.reads("raw_demonstrations") and run.source("raw_demonstrations") is None,
        "prompts_path": run.writes("prompt_dataset") and run.source("raw_prompts") is None,
        "sft_model_path": _is_null(run, "sft_policy"),
        "reward_model_path": _is_null(run, "reward_model") and reward_model_is_needed(run),
    }
    for setting in (name for name, is_null in needed.items() if is_null):
        run.problems.append(f"{setting} names nothing. Set it in conf/local/globals.yml or with --params {setting}=…")
    ppo = run.group("ppo")
    if isinstance(ppo, PPOConfig):
        run.problems += ppo.misplaced_paths()


def _is_null(run: RunRequest, name: str) -> bool:
    is_used = run.reads(name) or run.writes(name)
    return is_used and isinstance(run.catalog.get(name), PretrainedModelDataset) and run.source(name) is None


def _is_nowhere(run: RunRequest, name: str) -> bool:
    if name not in run.catalog:
        return True
    dataset = run.catalog[name]
    return isinstance(dataset, MemoryDataset) and not dataset.exists()


def _tables(run: RunRequest) -> dict[str, pd.DataFrame]:
    loaded = {name: run.load(name) for name in TABLES if run.reads(name)}
    return {name: frame for name, frame in loaded.items() if frame is not None}
