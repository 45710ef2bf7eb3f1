"""A store with an experiment, tiny policies, and `collect_feedback` on them without a Kedro session.

`python -m tests.pipelines.feedback_project FOLDER POINT` runs it and kills itself at a point.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.datasets import PairSheetDataset, PairTablesDataset, review_queues
from ppo_rlhf.datasets.review_queues import ReviewQueues
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.collect_feedback import nodes
from ppo_rlhf.supervised.comparisons import FeedbackConfig

PROMPTS = table_of({"prompt": [f"{a} {b}" for a in "abcd" for b in "efgh"], "number": [*range(16)]})
PPO = PPOConfig(response_length=6, device="cpu", dtype="float32", temperature=1.0)
POINTS = ("before the first trace", "between two traces", "between traces and queue")


def use_store(folder: Path) -> ReviewQueues:
    """Let the nodes use the store in a folder, whose experiment is `own`."""
    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    if client.get_experiment_by_name("own") is None:
        client.create_experiment("own", artifact_location=str(folder / "artifacts"))
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("own")
    review_queues.place.uri, review_queues.place.experiment = uri, "own"
    return ReviewQueues(uri, "own")


def collect(folder: Path, **settings: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Run the nodes of the pipeline in a run of their own; return the pairs and what was done."""
    feedback = FeedbackConfig(**{"pairs": 6, **settings})
    handles = [PretrainedHandle(str(folder / name)) for name in ("sft", "ppo")]
    with mlflow.start_run():
        tables = pair_tables(folder)
        queued = nodes.find_queued_pairs(tables.load(), feedback)
        table = nodes.sample_pairs(queued, *handles, PROMPTS, None, PPO, PromptsConfig(), feedback)
        tables.save(table)  # as the catalog does between the nodes
        done, sheet = nodes.queue_pairs(tables.load(), queued, feedback)
        PairSheetDataset(str(folder / "feedback_pairs")).save(sheet)
        return table, done


def pair_tables(folder: Path) -> PairTablesDataset:
    """Return the tables of the pairs that `collect` made in a folder."""
    return PairTablesDataset(str(folder / "feedback_pairs"))


def _kill_at(point: str) -> None:
    def kill(*_: Any, **__: Any) -> None:
        mlflow.flush_trace_async_logging()
        os.kill(os.getpid(), signal.SIGKILL)

    if point == POINTS[0]:
        ReviewQueues.write = kill  # type: ignore[method-assign]
    elif point == POINTS[2]:
        ReviewQueues.attach = kill  # type: ignore[method-assign]
    else:
        start, made = mlflow.start_span, []

        def start_or_kill(*arguments: Any, **options: Any) -> Any:
            if len(made) == 3:
                kill()
            made.append(1)
            return start(*arguments, **options)

        mlflow.start_span = start_or_kill


if __name__ == "__main__":
    use_store(Path(sys.argv[1]))
    _kill_at(sys.argv[2])
    collect(Path(sys.argv[1]))
