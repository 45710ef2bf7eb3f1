"""A cache on disk of the answers of LLM judges, so that a request equal to an earlier request is not sent and paid
again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ppo_rlhf.core.errors import RewardError

PATIENCE_S = 60.0
"""Timeout in seconds for waiting while another run writes to the same answer cache."""


class JudgeAnswer(NamedTuple):
    """An answer of a language model."""

    text: str
    is_whole: bool
    """False if the answer was cut off at the token limit: a number at the end of the answer may then lack digits."""
    sent_instead: str = ""
    """What the server sent in place of an empty text. Not cached, as empty answers are not."""


class AnswerCache:
    """A database file of LLM judges' answers. A cache without a path stores nothing. `write` commits each answer to
    disk at once.
    """

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
                self._database.execute("CREATE TABLE IF NOT EXISTS unusable (key TEXT PRIMARY KEY)")
            except (OSError, sqlite3.Error) as error:
                self.__exit__()
                raise self._unusable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._database is not None:
            self._database.close()

    def read(self, keys: Iterable[str]) -> dict[str, JudgeAnswer]:
        """Return the cached answers to the requests with the given keys."""
        answers = {}
        if self._database is not None:
            try:
                for key in keys:
                    row = self._database.execute("SELECT text, is_whole FROM answers WHERE key = ?", (key,)).fetchone()
                    if row is not None:
                        answers[key] = JudgeAnswer(row[0], bool(row[1]))
            except sqlite3.Error as error:
                raise self._unusable(error) from error
        return answers

    def write(self, key: str, answer: JudgeAnswer, *, is_usable: bool) -> None:
        """Store a judge's answer under the key of its request. The table `unusable` marks answers without a score or
        verdict.
        """
        if self._database is not None:
            try:
                row = (key, answer.text, answer.is_whole)
                self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)
                mark = (
                    "DELETE FROM unusable WHERE key = ?" if is_usable else "INSERT OR IGNORE INTO unusable VALUES (?)"
                )
                self._database.execute(mark, (key,))
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> RewardError:
        return RewardError(
            f"{self._path}: the judge's answers cannot be stored there ({error}). Check the disk and the file's "
            "permissions, or set llm.cache to another file, or to null, which disables the cache."
        )
