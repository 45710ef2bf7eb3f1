"""Demonstrations and preferences: read as the run will read them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.quiet import errors_only
from ppo_rlhf.ppo.evaluation import DEMO_JUDGE, is_demo_prompts
from ppo_rlhf.preflight.prompts import FuturePolicy
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.training.supervised.demonstrations import (
    PARTS,
    DataPreparationConfig,
    corpus_texts,
    split_demonstrations,
    tokenise_demonstrations,
)
from ppo_rlhf.training.supervised.preferences import check_preferences, tokenise_preferences
from ppo_rlhf.training.supervised.reward_training import RewardModellingConfig, split_pairs
from ppo_rlhf.training.supervised.sft import SupervisedFinetuningConfig

PROBED_ROWS = 2  # enough to see whether a tokenizer can do with the kind of rows that a table has
FIRST_MEASURED_ROWS = 20  # nearly always enough to find one that is short enough
MEASURED_ROWS = 1000  # a larger part is left to the run: long texts of so many take seconds


def check_demonstrations(
    run: RunRequest, tables: dict[str, pd.DataFrame], models: dict[str, PretrainedHandle]
) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Note demonstrations that cannot be learnt from; return those that will be trained on and those held out."""
    settings = run.group("data_preparation")
    if not isinstance(settings, DataPreparationConfig) or "raw_demonstrations" not in tables:
        return None
    with run.noting():
        trained, held_out = split_demonstrations(tables["raw_demonstrations"], settings)
        if not run.writes("sft_policy"):
            return trained, held_out
        if "base_model" in models:
            tokenise_demonstrations(trained.head(PROBED_ROWS), models["base_model"].tokenizer(), max_length=None)
        elif run.source("base_model") is None:
            next(corpus_texts(trained))  # refuses chats: a model from scratch has no chat template
        return trained, held_out
    return None


def check_lengths(
    run: RunRequest, parts: tuple[pd.DataFrame, pd.DataFrame] | None, policy: FuturePolicy | None
) -> None:
    """Note a part of the demonstrations, if it is not large, of which nothing can be learnt at the length in use."""
    settings = run.group("supervised_finetuning")
    if parts is None or policy is None or not isinstance(settings, SupervisedFinetuningConfig):
        return
    limit = settings.longest_sequence(policy.context)
    for name, part in zip(PARTS, parts, strict=True):
        if len(part) <= MEASURED_ROWS:
            with run.noting(), errors_only("ppo_rlhf.training.supervised.demonstrations"):  # the run tells what it cuts
                try:
                    tokenise_demonstrations(part.head(FIRST_MEASURED_ROWS), policy.tokenizer, limit)
                except DataError:
                    tokenise_demonstrations(part, policy.tokenizer, limit, name)


def check_given_preferences(
    run: RunRequest, tables: dict[str, pd.DataFrame], models: dict[str, PretrainedHandle]
) -> None:
    """Note preferences that cannot be used, and missing ones that nobody but the demo's judge could make up for."""
    settings = run.group("reward_modelling")
    if not isinstance(settings, RewardModellingConfig):
        return
    with run.noting():
        if run.reads("raw_preferences") and run.source("raw_preferences") is None:
            _check_labeller(settings.labeller, run.source("raw_prompts"), run.project_path)
        if "raw_preferences" not in tables:
            return
        checked = check_preferences(
            tables["raw_preferences"], settings.prompt_column, settings.chosen_column, settings.rejected_column
        )
        prompts = checked["prompt"].map(str) if "prompt" in checked.columns else ""
        split_pairs(checked.assign(prompt=prompts), settings)
        start = models.get("base_model") if run.writes("sft_policy") else models.get("sft_policy")
        if start is not None:
            tokenise_preferences(checked.head(PROBED_ROWS), start.tokenizer())


def _check_labeller(labeller: str | None, prompts: str | None, project_path: Path) -> None:
    remedy = "Set preferences_path, or reward_modelling.labeller, or run --pipelines align with a reward of your own."
    if labeller is None:
        raise ConfigError(f"There are no preferences, and nobody to label any. {remedy}")
    if labeller == DEMO_JUDGE and not is_demo_prompts(prompts, project_path):
        raise ConfigError(f"There are no preferences, and the demo's judge cannot label answers to {prompts}. {remedy}")
