"""What a run records beside its checkpoints: evaluations, which decide which one is the best, and completions.

The evaluations are in one file, the completions of each sampled iteration in a file of JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_rlhf.checkpoints.files import checkpoint_iterations, checkpoint_name
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime.names import TRAINING_KL
from ppo_rlhf.runtime.whole_files import discard, written_whole

EVALUATIONS, COMPLETIONS = "evaluations.json", "completions"
RANKED_BY = ("iteration", "eval/kl", "eval/reward")


def read_evaluations(directory: Path, needed: Sequence[str] = RANKED_BY[:1]) -> list[dict[str, Any]]:
    """Return the evaluations logged in a run's directory, oldest first, with the numbers needed; none without a log.

    Raises:
        CheckpointError: The log is damaged. Taken for empty, it would be overwritten, and the best checkpoint deleted.
    """
    path = directory / EVALUATIONS
    if not path.is_file():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())
        if not isinstance(rows, list) or not all(isinstance(row[name], int | float) for row in rows for name in needed):
            raise TypeError(f"it is not a list of rows with the numbers {', '.join(needed)}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged ({error}). Mend it, or move it away: then the run continues, but no longer knows which "
            "checkpoint was its best, and may delete it"
        ) from None
    return rows


def add_evaluation(directory: Path, evaluation: Mapping[str, Any]) -> None:
    """Add a row to the log; one of the same iteration is replaced.

    Raises:
        CheckpointError: As `read_evaluations`.
        OSError: It cannot be written.
    """
    rows = [row for row in read_evaluations(directory) if row["iteration"] != evaluation["iteration"]] + [evaluation]
    with written_whole(directory / EVALUATIONS) as draft:
        draft.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def best_saved(directory: Path, kl_alarm: float, newest: int | None = None) -> int | None:
    """Return the best (`best_iteration`) of the iterations, up to `newest`, that are saved in a run's directory."""
    saved = {each for each in checkpoint_iterations(directory) if newest is None or each <= newest}
    rows = [row for row in read_evaluations(directory, RANKED_BY) if row["iteration"] in saved]
    return best_iteration(rows, kl_alarm)


def prune_run(directory: Path, config: PPOConfig, newest: int) -> None:
    """Delete a run's checkpoints but the newest `save_total_limit`, the best evaluated, and those after `newest`.

    Those are kept because a run that was resumed from an earlier checkpoint replaces them when it gets there.
    """
    best = best_saved(directory, config.kl_alarm, newest)
    found = [iteration for iteration in checkpoint_iterations(directory) if iteration <= newest]
    for iteration in found[: -config.save_total_limit]:
        if iteration != best:
            discard(directory / checkpoint_name(iteration))


def best_iteration(evaluations: Sequence[Mapping[str, Any]], kl_alarm: float) -> int | None:
    """Return the iteration with the highest judge score (else reward) of those with eval/kl ≤ kl_alarm, in nats.

    Rows of greedy responses, whose eval/kl estimates nothing, have `TRAINING_KL`, which then counts.
    """
    candidates = [row for row in evaluations if row.get(TRAINING_KL, row["eval/kl"]) <= kl_alarm]
    if not candidates:
        return None
    best = max(candidates, key=lambda row: (row.get("eval/judge_score", row["eval/reward"]), row["iteration"]))
    return int(best["iteration"])


def write_completions(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one iteration's rows to `completions/iteration_NNNNNN.jsonl`; no rows: nothing was due.

    An iteration that a resumed run repeats replaces its file. `datasets.load_dataset("json", data_files=…)` reads them.

    Raises:
        OSError: The file cannot be written.
    """
    if not rows:
        return
    with written_whole(directory / COMPLETIONS / f"{checkpoint_name(rows[0]['iteration'])}.jsonl") as draft:
        draft.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
