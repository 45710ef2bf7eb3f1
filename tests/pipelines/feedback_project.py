"""Tiny policies, and `collect_feedback` on them without a Kedro session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.datasets import PairTablesDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.pipelines.collect_feedback import nodes

PROMPTS = table_of({"prompt": [f"{a} {b}" for a in "abcd" for b in "efgh"], "number": [*range(16)]})
PPO = PPOConfig(response_length=6, device="cpu", dtype="float32", temperature=1.0)


def collect(folder: Path, **settings: Any) -> pd.DataFrame:
    """Run the nodes of the pipeline in a run of their own, and return the new pairs."""
    feedback = FeedbackConfig(**{"pairs": 6, **settings})
    handles = [PretrainedHandle(str(folder / name)) for name in ("sft", "ppo")]
    tables = pair_tables(folder)
    with mlflow.start_run():
        new = nodes.sample_pairs(tables.load(), *handles, PROMPTS, None, PPO, PromptsConfig(), feedback)
        tables.save(new)  # as the catalog does between the nodes
        nodes.put_pairs(tables.load(), feedback)
    return new


def pair_tables(folder: Path) -> PairTablesDataset:
    """Return the tables of the pairs that `collect` made in a folder."""
    return PairTablesDataset(str(folder / "feedback_pairs"))


def answers_file(folder: Path, table: pd.DataFrame, **answers: str) -> str:
    """Write an answers' file in which each person prefers one policy (`policy`, `against`) of all pairs, or a tie."""
    rows = [
        {"number": number, "person": person, "answer": "tie" if of == "tie" else "AB"[is_a != (of == "policy")]}
        for number, is_a in zip(table["number"], table["policy_is_a"], strict=True)
        for person, of in answers.items()
    ]
    file = folder / f"answers.{len([*folder.iterdir()])}.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)
