"""Load people's answers as a table of preferences, and store the rows that a reward model was trained on."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlflow
import pandas as pd

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import ASSISTANT, is_text
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.datasets.report_files import ReportFile
from ppo_rlhf.datasets.review_queues import Comparison, queues_here
from ppo_rlhf.models.quiet import said
from ppo_rlhf.runtime.whole_files import written_whole
from ppo_rlhf.supervised.answers import ALPHA, NUMBER, PEOPLE, RATIONALES, TRACE, WHEN, agreement, majority

if TYPE_CHECKING:
    from datasets import Dataset

SCHEME = "mlflow:"
"""A path with the prefix `mlflow:` names a review queue."""

log = logging.getLogger(__name__)


def load_answers(source: str) -> Dataset:
    """Return the preferences of `mlflow:<queue>` as `preferences_of` does.

    Raises:
        DataError, ConfigError: As `ReviewQueues.read` and `preferences_of`.
    """
    return preferences_of(queues_here().read(source.removeprefix(SCHEME)), source)


def preferences_of(comparisons: Sequence[Comparison], source: str) -> Dataset:
    """Return one row per pair in which a majority prefers one response.

    The columns are `prompt`, `chosen` and `rejected` (texts, or chats as messages), `tools` if a prompt has tools, and
    `number`, `trace_id`, `people`, `answered_at`, `rationales` and `agreement`, which no model sees.

    Raises:
        DataError: No answer prefers a response, or the pairs have both texts and chats.
    """
    answers = [{answer.person: answer.value for answer in comparison.answers} for comparison in comparisons]
    chosen = [majority(values) for values in answers]
    alpha = agreement(answers)
    preferred = [pair for pair in zip(comparisons, chosen, strict=True) if pair[1] in ("A", "B")]
    # Leave out pairs with a blank response, because a table of preferences refuses blank texts
    rows = [_row(*pair, alpha) for pair in preferred if is_text(pair[0].response_a) and is_text(pair[0].response_b)]
    _log_counts(source, answers, chosen, alpha, blank=len(preferred) - len(rows))
    if not rows:
        raise DataError(
            f"{source}: nobody has preferred a response yet in {len(comparisons)} pairs. Let people answer some."
        )
    if len({is_text(row["chosen"]) for row in rows}) > 1:
        raise DataError(f"{source}: these are pairs of texts and of chats. Collect each kind in a separate queue.")
    has_tools = any(row["tools"] is not None for row in rows)
    return table_of({name: [row[name] for row in rows] for name in rows[0] if name != "tools" or has_tools})


def _row(comparison: Comparison, chosen: str | None, alpha: float | None) -> dict[str, Any]:
    better, worse = comparison.response_a, comparison.response_b
    if chosen == "B":
        better, worse = worse, better
    answers = sorted(comparison.answers, key=lambda answer: answer.when)
    is_chat = not is_text(comparison.prompt)
    return {
        "prompt": comparison.prompt,
        "chosen": [{"role": ASSISTANT, "content": better}] if is_chat else better,
        "rejected": [{"role": ASSISTANT, "content": worse}] if is_chat else worse,
        "tools": None if comparison.tools is None else as_json(comparison.tools),
        NUMBER: comparison.number,
        TRACE: comparison.trace_id,
        PEOPLE: [answer.person for answer in answers],
        WHEN: [answer.when for answer in answers],
        RATIONALES: [answer.rationale for answer in answers],
        ALPHA: alpha,
    }


def _log_counts(
    source: str, answers: list[dict[str, str]], chosen: list[str | None], alpha: float | None, *, blank: int
) -> None:
    """Log once per run how many pairs of a review queue are used, and why the remaining pairs are not used."""
    unanswered = sum(not values for values in answers)
    counts = Counter(choice for choice, values in zip(chosen, answers, strict=True) if values)
    used, people = counts["A"] + counts["B"] - blank, len({person for values in answers for person in values})
    line = (
        f"{source}: {used} of {len(answers)} pairs are used; {counts['tie']} ties, {counts['both bad']} both bad, "
        f"{counts[None]} without a majority, {unanswered} unanswered, {blank} with a blank response. {people} people"
        + ("." if alpha is None else f", whose agreement (Krippendorff's alpha) is {alpha:.2f}.")
    )
    if line not in said:
        said.add(line)
        log.info("%s", line)


class MlflowAnswersDataset(ReportFile[pd.DataFrame, pd.DataFrame]):
    """The answered pairs that a reward model was trained on: a JSON-lines file, also logged as an artifact of the run.

    After the traces in MLflow are deleted, the file can serve as `preferences_path`. Saving an empty table changes
    nothing. Example:

    ```yaml
    answered_preferences:
      type: ppo_rlhf.datasets.MlflowAnswersDataset
      filepath: data/06_models/answered_preferences.jsonl
    ```
    """

    def save(self, data: pd.DataFrame) -> None:
        """Write the answered pairs to the file, and log the file in the active MLflow run."""
        if data.empty:
            return
        with written_whole(self._filepath) as draft:
            draft.write_text("".join(f"{as_json(row)}\n" for row in data.to_dict("records")), encoding="utf-8")
        if mlflow.active_run() is not None:
            mlflow.log_artifact(str(self._filepath), "preferences")

    def load(self) -> pd.DataFrame:
        """Return the pairs on which the newest reward training with answered pairs was trained."""
        lines = self._filepath.read_text(encoding="utf-8").split("\n")
        return pd.DataFrame([json.loads(line) for line in lines if line])
