"""The answers of language models that judge, kept by the content of the request, so that none is paid twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ppo_rlhf.core.errors import RewardError

PATIENCE_S = 60.0
"""How long to wait for another run that writes to the same file."""


class Answer(NamedTuple):
    """What a language model answered."""

    text: str
    is_whole: bool
    """Whether the model ended by itself: a number at the end of a cut-off answer may lack digits."""


class AnswerCache:
    """A file of answers; without a path it is empty and keeps nothing. Each answer is on disk once it is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None

    def __enter__(self) -> AnswerCache:
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._database = sqlite3.connect(self._path, timeout=PATIENCE_S, isolation_level=None)
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL, is_whole INTEGER)"
                )
            except (OSError, sqlite3.Error) as error:
                self.__exit__()
                raise self._unusable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._database is not None:
            self._database.close()

    def read(self, keys: Iterable[str]) -> dict[str, Answer]:
        """Return the answers that are there, by their keys."""
        found = {}
        if self._database is not None:
            try:
                for key in keys:
                    row = self._database.execute("SELECT text, is_whole FROM answers WHERE key = ?", (key,)).fetchone()
                    if row is not None:
                        found[key] = Answer(row[0], bool(row[1]))
            except sqlite3.Error as error:
                raise self._unusable(error) from error
        return found

    def write(self, key: str, answer: Answer) -> None:
        """Keep an answer."""
        if self._database is not None:
            try:
                row = (key, answer.text, answer.is_whole)
                self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> RewardError:
        return RewardError(
            f"{self._path}: the judge's answers cannot be kept there ({error}). Remove the file, set llm.cache to "
            "another one, or to null to keep none."
        )
