"""What a run keeps beside its checkpoints: evaluations, which decide the best checkpoint, and completions.

The evaluations are lines of metrics.jsonl. The completions of each sampled iteration are a file of JSON lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.runtime.metrics_file import metrics_of
from ppo_rlhf.runtime.names import TRAINING_KL
from ppo_rlhf.runtime.whole_files import discard, written_whole

COMPLETIONS = "completions"
RANKED_BY = ("iteration", "eval/kl", "eval/reward")
_DECIDING = (*RANKED_BY, "eval/judge_score", TRAINING_KL)


def read_evaluations(directory: Path, needed: Sequence[str] = RANKED_BY[:1]) -> list[dict[str, Any]]:
    """Return the evaluations in a run's metrics.jsonl, oldest first, or an empty list without one.

    Each row has the keys in `needed`. The numbers that decide are finite.

    Raises:
        CheckpointError: metrics.jsonl is damaged. If a damaged file counted as empty, the best checkpoint would be
            deleted.
    """
    file = metrics_of(directory)
    rows = file.evaluations()
    for row in rows:
        odd = [name for name in needed if name not in row]
        odd += [name for name in _DECIDING if not math.isfinite(row.get(name, 0.0))]
        if odd:
            raise CheckpointError(f"{file.path}: the evaluation {row} has no finite number {odd[0]}"[:500])
    return rows


def best_saved(directory: Path, config: PPOConfig, last: int | None = None) -> int | None:
    """Return the best iteration (see `best_iteration`) with a checkpoint that `ppo.save_interval` asks for.

    Checkpoints that time or a signal asked for do not count: which checkpoint is the best must not depend on the clock.
    `last` is the run's last iteration, which counts, too.
    """
    saved = checkpoint_iterations(directory)
    counted = {each for each in saved if each % config.save_interval == 0 or each == last}
    rows = [row for row in read_evaluations(directory, RANKED_BY) if row["iteration"] in counted]
    return best_iteration(rows, config.kl_alarm)


def prune_run(directory: Path, config: PPOConfig, kept: int | None = None) -> None:
    """Delete a run's old checkpoints except the newest `save_total_limit`, the best one (`best_saved`) and `kept`."""
    best = best_saved(directory, config)
    for iteration in checkpoint_iterations(directory)[: -config.save_total_limit]:
        if iteration not in (best, kept):
            discard(directory / checkpoint_name(iteration))


def best_iteration(evaluations: Sequence[Mapping[str, Any]], kl_alarm: float) -> int | None:
    """Return the iteration with the highest judge score, or reward without a judge, whose KL is at most kl_alarm
    (nats).

    The function returns None if every iteration's KL is above `kl_alarm`. The KL is `TRAINING_KL` if a row has it, else
    eval/kl: eval/kl of greedy responses does not estimate the policy's KL.
    """
    candidates = [row for row in evaluations if row.get(TRAINING_KL, row["eval/kl"]) <= kl_alarm]
    if not candidates:
        return None
    best = max(candidates, key=lambda row: (row.get("eval/judge_score", row["eval/reward"]), row["iteration"]))
    return int(best["iteration"])


def write_completions(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the completions of one iteration to `completions/iteration_NNNNNN.jsonl`; without rows write nothing.

    If a resumed run repeats an iteration, the new file replaces the old file.
    `datasets.load_dataset("json", data_files=…)` reads the files.

    Raises:
        OSError: The file cannot be written.
    """
    if not rows:
        return
    with written_whole(directory / COMPLETIONS / f"{checkpoint_name(rows[0]['iteration'])}.jsonl") as draft:
        draft.write_text("".join(f"{as_json(row)}\n" for row in rows), encoding="utf-8")
