"""Pairs of responses as files: tables that say which policy wrote each response, the pairs as JSON lines for another
program to ask people, people's answers as JSON lines, and the answered pairs that a reward model was trained on.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from kedro.io import AbstractDataset

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.sources import load_table
from ppo_rlhf.datasets.report_files import ReportFile
from ppo_rlhf.runtime.whole_files import process_name, written_whole
from ppo_rlhf.supervised.people_answers import ANSWERS, NUMBER, Answer, Comparison, warn_of_others

ANSWER = "answer"
"""Column of a file of people's answers, which needs `NUMBER`, too; `person`, `time` and `rationale` may be missing."""
NEEDED = ("number", "queue", "pair", "response_a", "response_b", "policy_is_a", "policy", "against")
"""Columns without which a table of pairs is damaged."""
SHEET = ("number", "prompt", "tools", "response_a", "response_b", "cut_off_a", "cut_off_b")

log = logging.getLogger(__name__)


class PairTablesDataset(AbstractDataset[pd.DataFrame, pd.DataFrame]):
    """The pairs of all runs of `collect_feedback`, with the side of each response: one Parquet table per run.

    Only these tables tell which policy wrote which response. They are no artifacts of MLflow, where everybody who may
    read a run would see them. Loading returns the rows of all tables, in the order of their numbers. Example:

    ```yaml
    feedback_pairs:
      type: ppo_rlhf.datasets.PairTablesDataset
      path: data/07_model_output/feedback_pairs
    ```
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self.folder = Path(path)
        self.metadata = metadata

    def save(self, data: pd.DataFrame) -> None:
        """Write the table of the active MLflow run, whole or not at all."""
        run = mlflow.active_run()
        with written_whole(self.folder / f"{run.info.run_id if run else process_name()}.parquet") as draft:
            data.to_parquet(draft)

    def load(self) -> pd.DataFrame:
        """Return the rows of all tables; an empty table before the first collection.

        Raises:
            DataError: A table is damaged.
        """
        return read_pair_tables(self.folder)

    def _exists(self) -> bool:
        return True  # before the first collection, the table of all pairs is empty

    def _describe(self) -> dict[str, Any]:
        return {"path": str(self.folder)}


def read_pair_tables(folder: Path) -> pd.DataFrame:
    """Return the rows of all tables of a folder as `PairTablesDataset.load` does."""
    tables = [_read(file) for file in sorted(folder.glob("*.parquet"))]
    if not tables:
        return pd.DataFrame(columns=[*NEEDED])
    return pd.concat(tables, ignore_index=True).sort_values("number", ignore_index=True, kind="stable")


def _read(file: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: this table of pairs is damaged: {in_one_line(error)}. Restore the file.") from error
    return check_pair_table(table, str(file))


def check_pair_table(table: pd.DataFrame, where: str, needed: tuple[str, ...] = NEEDED) -> pd.DataFrame:
    """Return a table of pairs unchanged; raise `DataError` if a column is missing."""
    if lacking := [name for name in needed if name not in table.columns]:
        raise DataError(f"{where}: this table of pairs is damaged: no column {', '.join(lacking)}. Restore the file.")
    return table


class PairSheetDataset(AbstractDataset[dict[str, Any], None]):
    """Pairs without their sides, as JSON lines: number, prompt, tools, response_a, response_b, cut_off_a, cut_off_b.

    `save` takes `rows` (of a table of pairs), `queue`, and `path` (None: a file in the folder `path` of the entry). No
    rows write nothing. Example:

    ```yaml
    feedback_sheet:
      type: ppo_rlhf.datasets.PairSheetDataset
      path: data/07_model_output/feedback_pairs
    ```
    """

    def __init__(self, path: str, metadata: dict[str, Any] | None = None) -> None:
        self.folder = Path(path)
        self.metadata = metadata

    def save(self, data: dict[str, Any]) -> None:
        """Write the file, whole or not at all, and log its path."""
        if not data["rows"]:
            return
        lines = [vars(comparison_of(row)) for row in data["rows"]]
        file = Path(data["path"] or self.folder / f"{data['queue']}.{lines[0]['number']}.jsonl")
        with written_whole(file) as draft:
            text = "".join(f"{as_json({name: line[name] for name in SHEET})}\n" for line in lines)
            draft.write_text(text, encoding="utf-8")
        log.info("%d pairs are in %s, for another program to ask people.", len(lines), file)

    def load(self) -> None:
        return None

    def _exists(self) -> bool:
        return False

    def _describe(self) -> dict[str, Any]:
        return {"path": str(self.folder)}


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


def comparison_of(row: Mapping[str, Any], answers: tuple[Answer, ...] = ()) -> Comparison:
    """Return the pair of a row of a table of pairs."""
    is_chat = isinstance(row["prompt_chat"], str)
    return Comparison(
        number=int(row["number"]),
        prompt=json.loads(row["prompt_chat"]) if is_chat else row["prompt"],
        response_a=row["response_a"],
        response_b=row["response_b"],
        tools=json.loads(row["tools"]) if is_chat else None,
        cut_off_a=bool(row["cut_off_a"]),
        cut_off_b=bool(row["cut_off_b"]),
        answers=answers,
    )


def is_answers(columns: Iterable[str]) -> bool:
    """Return whether a table has people's answers."""
    return {NUMBER, ANSWER} <= {*columns}


def answers_of(table: Iterable[Mapping[str, Any]], source: str) -> dict[int, tuple[Answer, ...]]:
    """Return each person's newest answer to each pair, by the pair's number.

    Answers that are not in `ANSWERS` are left out with a warning.

    Raises:
        DataError: A number is not a whole number.
    """
    newest: dict[int, dict[str, Answer]] = defaultdict(dict)
    others: list[str] = []
    given: list[tuple[int, Answer]] = []
    for row, each in enumerate(table):
        number = each[NUMBER]
        if not isinstance(number, int | str | float) or not re.fullmatch(r"\d+(\.0)?", str(number)):
            raise DataError(f"{source}: row {row}: number={number!r} is not the number of a pair. Give it as exported.")
        texts = [str(each[name]) if each.get(name) is not None else "" for name in ("person", "time", "rationale")]
        answer = Answer(str(each[ANSWER]), texts[0] or "default", *texts[1:])
        given.append((int(str(number).removesuffix(".0")), answer))
    for number, answer in sorted(given, key=lambda pair: pair[1].when):
        newest[number][answer.person] = answer
    for number, by_person in newest.items():
        others += [answer.value for answer in by_person.values() if answer.value not in ANSWERS]
        newest[number] = {person: answer for person, answer in by_person.items() if answer.value in ANSWERS}
    warn_of_others(source, others)
    return {number: tuple(by_person.values()) for number, by_person in newest.items()}


def answered_pairs(source: str, pairs: pd.DataFrame, where: str) -> list[tuple[Comparison, dict[str, Any]]]:
    """Return the pairs that a file of answers answers, with their rows of the tables of pairs.

    Raises:
        DataError: The file cannot be read, is none of answers, or answers no pair of the tables.
    """
    table = load_table(source)
    if not is_answers(table.column_names):
        columns = ", ".join(table.column_names)
        raise DataError(f"{source}: a file of answers has the columns number and answer; this one has {columns}.")
    return join_answers(table.to_list(), pairs, source, where)


def join_answers(
    table: Iterable[Mapping[str, Any]], pairs: pd.DataFrame, source: str, where: str
) -> list[tuple[Comparison, dict[str, Any]]]:
    """Return the pairs of a table of answers as `answered_pairs` does; `where` names the folder of the tables."""
    answers = answers_of(table, source)
    rows = {int(row["number"]): row for row in pairs.to_dict("records")}
    unknown = sorted(answers.keys() - rows.keys())
    if len(unknown) == len(answers):
        raise DataError(
            f"{source}: {where} has no pair of these numbers, for example {unknown[0]}. Give the pairs' own."
        )
    if unknown:
        log.warning("%s: %d of %d numbers are of no pair and are left out.", source, len(unknown), len(answers))
    return [(comparison_of(row, answers[number]), row) for number, row in rows.items() if number in answers]
