"""Reward functions and judges: imported and called once with real prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pandas as pd

from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.training.data.prompts import PromptsConfig, is_prompt
from ppo_rlhf.training.evaluation import EvaluationConfig, resolve_judge
from ppo_rlhf.training.rewards import RewardConfig, RewardFunction, call_reward_function, load_function
from ppo_rlhf.training.supervised.reward_training import RewardModellingConfig

PROBED_PROMPTS = 2


def check_functions(run: RunRequest, tables: dict[str, pd.DataFrame]) -> None:
    """Note functions that cannot be imported, fail, or do not return one finite number a response."""
    prompts, columns = _probe(run, tables)
    for name, function in _functions(run):
        if prompts:
            run.attempt(partial(call_reward_function, function, name, prompts, prompts, columns))


def _functions(run: RunRequest) -> Iterator[tuple[str, RewardFunction]]:
    reward, evaluation, rewards = (run.group(name) for name in ("reward", "evaluation", "reward_modelling"))
    with _no_bytecode():
        if isinstance(reward, RewardConfig):
            for reference in dict.fromkeys(c.function for c in reward.components if c.function is not None):
                function = run.attempt(partial(load_function, reference, run.project_path))
                if function is not None:
                    yield reference, function
        if isinstance(rewards, RewardModellingConfig) and run.source("raw_preferences") is None and rewards.labeller:
            labeller = run.attempt(partial(load_function, str(rewards.labeller), run.project_path))
            if labeller is not None:
                yield f"reward_modelling.labeller={rewards.labeller}", labeller
        if isinstance(evaluation, EvaluationConfig):
            resolved = run.attempt(lambda: resolve_judge(evaluation, run.project_path))
            if resolved is not None:
                if resolved.judge is not None:
                    yield f"evaluation.judge={evaluation.judge or 'the demo judge'}", resolved.judge
                yield from ((f"evaluation.rates.{name}", function) for name, function in resolved.rates.items())


def _probe(run: RunRequest, tables: dict[str, pd.DataFrame]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return a few prompts as text, which also stand for responses, and the other columns of their rows."""
    settings, frame = run.group("prompts"), tables.get("raw_prompts")
    if not isinstance(settings, PromptsConfig) or frame is None or settings.column not in frame.columns:
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
