"""A cache on disk of the answers of LLM judges, so that a request equal to an earlier request is not sent and paid
again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ppo_rlhf.core.errors import RewardError, in_one_line

PATIENCE_S = 60.0
"""Timeout in seconds for waiting while another run writes to the same answer cache."""


class JudgeAnswer(NamedTuple):
    """An answer of a language model."""

    text: str
    is_whole: bool
    """False if the answer was cut off at the token limit: a number at the end of the answer may then lack digits."""
    note: str = ""
    """Why the answer is empty or was cut off; not cached."""


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
                columns = "(key TEXT PRIMARY KEY, text TEXT NOT NULL, is_whole INTEGER)"
                self._database.execute(f"CREATE TABLE IF NOT EXISTS answers {columns}")
            except (OSError, sqlite3.Error) as error:
                self.__exit__()
                raise self._unusable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._database is not None:
            self._database.close()

    def read(self, keys: Iterable[str]) -> dict[str, JudgeAnswer]:
        """Return the cached answers to the requests with the given keys."""
        wanted = "SELECT text, is_whole FROM answers WHERE key = ? AND typeof(text) = 'text'"
        rows = {key: self._run(wanted, key) for key in keys}
        return {key: JudgeAnswer(found[0][0], bool(found[0][1])) for key, found in rows.items() if found}

    def write(self, key: str, answer: JudgeAnswer) -> None:
        """Store a judge's answer under the key of its request."""
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", key, answer.text, answer.is_whole)

    def _run(self, command: str, *values: object) -> list[tuple[Any, ...]]:
        if self._database is None:
            return []
        try:
            return self._database.execute(command, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> RewardError:
        return RewardError(
            f"{self._path}: the judge's answers cannot be stored there ({in_one_line(error)}). Check the disk and the "
            "file's permissions, or set llm.cache to another file, or to null, which disables the cache."
        )
