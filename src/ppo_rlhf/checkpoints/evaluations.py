"""Records that a run keeps beside its checkpoints: evaluations, which decide the best checkpoint, and completions.

All evaluations are in one JSON file. The completions of each sampled iteration are in one file of JSON lines.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.runtime.names import TRAINING_KL
from ppo_rlhf.runtime.whole_files import discard, written_whole

EVALUATIONS, COMPLETIONS = "evaluations.json", "completions"
RANKED_BY = ("iteration", "eval/kl", "eval/reward")
_DECIDING = (*RANKED_BY, "eval/judge_score", TRAINING_KL)
_DIGEST = "sha256"
"""Key in each stored row: the SHA-256 of the rest of the row."""


def read_evaluations(directory: Path, needed: Sequence[str] = RANKED_BY[:1]) -> list[dict[str, Any]]:
    """Return the evaluations that were logged in a run's directory, oldest first, or an empty list without a log.

    Each row must be as it was written, and have the keys in `needed`. The numbers that decide are finite.

    Raises:
        CheckpointError: The log of evaluations is damaged. If a damaged log counted as empty, the next evaluation would
            overwrite the log, and the best checkpoint would be deleted.
    """
    path = directory / EVALUATIONS
    if not path.is_file():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TypeError("the log must be a list of rows")
        for number, row in enumerate(rows, 1):
            if row.pop(_DIGEST, None) != _digest(row):
                raise ValueError(f"row {number} differs from its SHA-256")
            if odd := [name for name in needed if name not in row] + [
                name for name in _DECIDING if not math.isfinite(row.get(name, 0.0))
            ]:
                raise ValueError(f"row {number} has no finite number {odd[0]}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged ({error}). Restore the file, or move it away: the run then continues, but no longer "
            "knows which checkpoint was its best, and may delete the best checkpoint"
        ) from None
    return rows


def add_evaluation(directory: Path, evaluation: Mapping[str, Any]) -> None:
    """Add a row to the log of evaluations. The new row replaces an earlier row of the same iteration.

    Raises:
        CheckpointError: The log of evaluations is damaged, see `read_evaluations`.
        OSError: The log of evaluations cannot be written.
    """
    rows = [row for row in read_evaluations(directory) if row["iteration"] != evaluation["iteration"]] + [evaluation]
    stored = [{**row, _DIGEST: _digest(row)} for row in rows]
    with written_whole(directory / EVALUATIONS) as draft:
        draft.write_text(json.dumps(stored, indent=1), encoding="utf-8")


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def best_saved(directory: Path, kl_alarm: float, newest: int | None = None) -> int | None:
    """Return the best iteration (see `best_iteration`) that has a checkpoint in a run's directory.

    Checkpoints of iterations after `newest` do not count.
    """
    saved = {each for each in checkpoint_iterations(directory) if newest is None or each <= newest}
    rows = [row for row in read_evaluations(directory, RANKED_BY) if row["iteration"] in saved]
    return best_iteration(rows, kl_alarm)


def prune_run(directory: Path, config: PPOConfig, newest: int, kept: int | None = None) -> None:
    """Delete a run's old checkpoints except the newest `save_total_limit`, the best one (`best_saved`) and `kept`.

    Checkpoints after iteration `newest` are kept, too: a run that was resumed from an earlier checkpoint replaces the
    later checkpoints when it reaches their iterations.
    """
    best = best_saved(directory, config.kl_alarm, newest)
    saved = [iteration for iteration in checkpoint_iterations(directory) if iteration <= newest]
    for iteration in saved[: -config.save_total_limit]:
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
