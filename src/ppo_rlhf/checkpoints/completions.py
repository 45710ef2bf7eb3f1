"""The completions of sampled iterations, a file of JSON lines for each, beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ppo_rlhf.checkpoints.files import checkpoint_name
from ppo_rlhf.whole_files import written_whole

FOLDER = "completions"


def write_completions(run_directory: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one iteration's rows to `completions/iteration_NNNNNN.jsonl`; no rows: nothing was due.

    An iteration that a resumed run repeats replaces its file. `datasets.load_dataset("json", data_files=…)` reads them.

    Raises:
        OSError: The file cannot be written.
    """
    if not rows:
        return
    iteration = rows[0]["iteration"]
    assert isinstance(iteration, int)
    with written_whole(run_directory / FOLDER / f"{checkpoint_name(iteration)}.jsonl") as draft:
        draft.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
