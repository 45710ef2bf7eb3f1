"""Reward functions and judges: imported and called once with real prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pandas as pd

from ppo_rlhf.data.prompts import PromptsConfig, is_prompt
from ppo_rlhf.ppo.evaluation import EvaluationConfig, resolve_judge
from ppo_rlhf.preflight.request import PROMPT_TABLES, RunRequest
from ppo_rlhf.rewards.functions import check_column_names
from ppo_rlhf.rewards.scorers import RewardConfig, RewardFunction, call_reward_function, load_function
from ppo_rlhf.training.supervised.reward_training import RewardModellingConfig

PROBED_PROMPTS = 2


def check_functions(run: RunRequest, tables: dict[str, pd.DataFrame]) -> None:
    """Note functions that cannot be imported, fail, or do not return one finite number a response."""
    both = [name for name in PROMPT_TABLES if name in tables]
    probes = {name: _probe(run, tables[name]) for name in both}
    for name, function, read in _functions(run, both):
        for table in read:
            with run.noting():
                check_column_names(tables[table].columns, str(run.source(table)), _column(run))
            prompts, columns = probes[table]
            where = "" if table == both[0] else f" on {run.source(table)}"
            if prompts and not run.attempt(
                partial(call_reward_function, function, name + where, prompts, prompts, columns)
            ):
                break  # one mistake is one line


def _column(run: RunRequest) -> str | None:
    """Return the name of the prompts' column, None where the run has no group `prompts` to say so."""
    settings = run.group("prompts")
    return settings.column if isinstance(settings, PromptsConfig) else None


def _functions(run: RunRequest, tables: list[str]) -> Iterator[tuple[str, RewardFunction, list[str]]]:
    """Return the functions with their names, and those of the tables whose prompts and columns they will get."""
    reward, evaluation, rewards = (run.group(name) for name in ("reward", "evaluation", "reward_modelling"))
    with _no_bytecode():
        if isinstance(reward, RewardConfig):
            for reference in dict.fromkeys(c.function for c in reward.components if c.function is not None):
                function = run.attempt(partial(load_function, reference, run.project_path))
                if function is not None:
                    yield reference, function, tables
        if isinstance(rewards, RewardModellingConfig) and run.source("raw_preferences") is None and rewards.labeller:
            labeller = run.attempt(partial(load_function, str(rewards.labeller), run.project_path))
            if labeller is not None:
                yield f"reward_modelling.labeller={rewards.labeller}", labeller, tables[:1]  # of training prompts
        if isinstance(evaluation, EvaluationConfig):
            resolved = run.attempt(lambda: resolve_judge(evaluation, run.project_path))
            if resolved is not None:
                if resolved.judge is not None:
                    yield f"evaluation.judge={evaluation.judge or 'the demo judge'}", resolved.judge, tables[-1:]
                for name, function in resolved.rates.items():
                    yield f"evaluation.rates.{name}", function, tables[-1:]  # held-out prompts, as the judge


def _probe(run: RunRequest, frame: pd.DataFrame) -> tuple[list[str], dict[str, list[Any]]]:
    """Return a few prompts as text, which also stand for responses, and the other columns of their rows."""
    settings = run.group("prompts")
    if not isinstance(settings, PromptsConfig) or settings.column not in frame.columns:
        return [], {}
    rows = frame.head(PROBED_PROMPTS)
    if not all(is_prompt(value) for value in rows[settings.column]):
        return [], {}  # check_prompts says so
    columns = {str(name): rows[name].tolist() for name in rows.columns if name != "prompt"}
    return [_text(value) for value in rows[settings.column]], columns


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Import a person's file without leaving a __pycache__ beside it: a refused run writes nothing."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
