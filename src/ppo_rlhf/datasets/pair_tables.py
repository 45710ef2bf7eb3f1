"""Pairs of responses and people's answers as files.

`pairs.jsonl` has the pairs as people see them; a table of its own says which policy wrote each response. People's
answers come back as JSON lines or CSV, or from MLflow's review queue, whose answers become such a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from kedro.io import AbstractDataset

from ppo_rlhf.core.errors import DataError, in_one_line
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.sources import load_table
from ppo_rlhf.datasets import mlflow_queue
from ppo_rlhf.people.answers import ANSWERS, RANDOM, SHEET, Comparison, answers_of, is_answers
from ppo_rlhf.runtime.locks import one_at_a_time
from ppo_rlhf.runtime.paths import below_project, in_project
from ppo_rlhf.runtime.whole_files import written_whole

NEEDED = (
    *("number", "queue", "collected", "place", "export", "prompt", "response_a", "response_b", "policy_is_a"),
    *("policy", "against", RANDOM),
)
"""Columns without which a table of pairs is damaged."""
UNWRITTEN = ".unwritten.parquet"
"""Ending of a table whose pairs are not yet written to their file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectedPairs:
    """All pairs that a project has collected: one row per pair, the newest last, with the side of each response.

    Only these tables tell which policy wrote which response. They are no artifacts of MLflow, where everybody who may
    read a run would see them.
    """

    folder: Path
    table: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> CollectedPairs:
        """Read the tables of a folder; there are none before the first collection.

        Raises:
            DataError: A table is damaged, or two pairs have one number.
        """
        tables = [_read(file) for file in sorted(folder.glob("*.parquet"))]
        if not tables:
            return cls(folder, pd.DataFrame(columns=[*NEEDED]))
        table = pd.concat(tables, ignore_index=True).sort_values(["collected", "place"], ignore_index=True)
        if (twice := table["number"][table["number"].duplicated()].tolist()) != []:
            raise DataError(f"{folder}: two pairs have the number {twice[0]}. Remove the table that is a copy.")
        return cls(folder, table)

    def answered(self, source: str) -> list[tuple[Comparison, dict[str, Any]]]:
        """Return the pairs that a file of answers or `mlflow:<queue>` answers, with their rows of the tables.

        Raises:
            DataError: The source cannot be read, has no answers, or answers no pair of the tables.
        """
        table = load_table(file_of_answers(source, self.folder))
        if not is_answers(table.column_names):
            columns = ", ".join(table.column_names)
            raise DataError(f"{source}: a file of answers has the columns number and answer; this one has {columns}.")
        return self.join(table, source)

    def join(self, answers: Iterable[Mapping[str, Any]], source: str) -> list[tuple[Comparison, dict[str, Any]]]:
        """Return the pairs that rows of answers answer, as `answered` does."""
        by_number = answers_of(answers, source)
        rows = {int(row["number"]): row for row in self.table.to_dict("records")}
        if not by_number:
            raise DataError(f"{source}: no pair is answered yet. An answer is one of {', '.join(ANSWERS)}.")
        unknown = sorted(by_number.keys() - rows.keys())
        if len(unknown) == len(by_number):
            raise DataError(
                f"{source}: {self.folder} has no pair of these numbers, for example {unknown[0]}. Give answers with "
                "the pairs' numbers."
            )
        if unknown:
            log.warning("%s: %d of %d numbers are of no pair and are left out.", source, len(unknown), len(by_number))
        return [(comparison_of(row, by_number[number]), row) for number, row in rows.items() if number in by_number]


class PairTablesDataset(AbstractDataset[pd.DataFrame, CollectedPairs]):
    """The pairs of all runs of `collect_feedback`.

    `save` takes the rows of one collection. It writes a table with the sides, then the pairs for people, without the
    sides, as JSON lines: to the file in the column `export`, or to a file in the folder if `export` is None. Until the
    file of the pairs is written the table is called `<second>.unwritten.parquet`; the file that a killed run did not
    write is written by the next `load`. `load` returns the `CollectedPairs` of all collections. Example:

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
        """Write the two files of a collection.

        Raises:
            DataError: One of the files exists: it is not overwritten.
        """
        unwritten = self.folder / f"{data['collected'].iloc[0]}{UNWRITTEN}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self.folder):
            for file in (self._sheet(data), _written(unwritten), unwritten):
                if file.exists():
                    raise DataError(f"{file}: this file exists, and is not overwritten. Did another run write it?")
            with written_whole(unwritten) as draft:
                data.to_parquet(draft)
            self._write_sheet(unwritten)

    def load(self) -> CollectedPairs:
        """Return the pairs of all collections, after writing the files of pairs that killed runs did not write.

        Raises:
            DataError: As `CollectedPairs.read`, or in the place of such a file of pairs there is another file.
        """
        if any(self.folder.glob(f"*{UNWRITTEN}")):
            with one_at_a_time(self.folder):
                for unwritten in sorted(self.folder.glob(f"*{UNWRITTEN}")):
                    self._write_sheet(unwritten)
        return CollectedPairs.read(self.folder)

    def _sheet(self, table: pd.DataFrame) -> Path:
        place, queue, export = (table[name].iloc[0] for name in ("place", "queue", "export"))
        return in_project(export) if isinstance(export, str) else self.folder / f"{queue}.{place}.pairs.jsonl"

    def _write_sheet(self, unwritten: Path) -> None:
        """Write the file of the pairs of a table, if the run that was killed had not written it; rename the table."""
        table = _read(unwritten)
        sheet, text, asked = self._sheet(table), "", table[table[RANDOM]]
        for row in asked.to_dict("records"):
            pair = vars(comparison_of(row))
            text += as_json({**{name: pair[name] for name in SHEET}, RANDOM: bool(row[RANDOM])}) + "\n"
        content = text.encode("utf-8")
        if not sheet.exists():
            with written_whole(sheet) as draft:
                draft.write_bytes(content)
        elif sheet.read_bytes() != content:
            raise DataError(
                f"{sheet}: this file exists, and is not overwritten: the pairs of {unwritten} belong there. Move the "
                "file, or remove the table, whose pairs nobody has seen."
            )
        unwritten.rename(_written(unwritten))
        log.info("%d pairs are in %s.", len(asked), sheet)

    def _exists(self) -> bool:
        return True  # before the first collection, there are no pairs

    def _describe(self) -> dict[str, Any]:
        return {"path": str(self.folder)}


def file_of_answers(source: str, folder: Path) -> str:
    """Return the file of people's answers; the answers of `mlflow:<queue>` are written to a file in the folder.

    The file's name has a hash of the answers, so that later answers do not replace those of an earlier run.
    """
    if not source.startswith(mlflow_queue.SCHEME):
        return below_project(source)
    queue = source.removeprefix(mlflow_queue.SCHEME)
    text = "".join(f"{as_json(row)}\n" for row in mlflow_queue.get(queue))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    file = folder / f"{queue}.answers.{digest}.jsonl"
    if not file.exists():
        with written_whole(file) as draft:
            draft.write_text(text, encoding="utf-8")
        log.info("The answers of %s are in %s.", source, file)
    return str(file)


def _written(unwritten: Path) -> Path:
    return unwritten.with_name(f"{unwritten.name.removesuffix(UNWRITTEN)}.parquet")


def _read(file: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(file)
        if lacking := [name for name in NEEDED if name not in table.columns]:
            raise ValueError(f"no column {', '.join(lacking)}")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: this table of pairs is damaged: {in_one_line(error)}. Restore the file.") from error
    return table


def comparison_of(row: Mapping[str, Any], answers: Mapping[str, str] | None = None) -> Comparison:
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
        answers=answers or {},
    )
