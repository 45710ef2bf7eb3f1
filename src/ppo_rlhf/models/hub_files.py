"""Single files of a model, from its directory or from the hub and its cache, and why one cannot be read."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import cached_file

from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.models.directories import ADAPTER_CONFIG, CONFIG


def find_file(place: str, revision: str, name: str, *, local_files_only: bool = False) -> Path | None:
    """Return a file of a model, from the hub if need be; None if it is not there."""
    try:
        found = cached_file(
            place,
            name,
            revision=revision,
            local_files_only=local_files_only,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no such repository, or a gated one: whatever reads the model says so
        return None
    return None if found is None else Path(found)


def check_on_hub(place: str, revision: str) -> None:
    """Raise `OSError` if the hub does not have a model, or does not answer and the cache has nothing of it.

    The client repeats a question for half a minute, so without an answer to this one no other is asked.
    """
    if not any(find_file(place, revision, name, local_files_only=True) for name in (CONFIG, ADAPTER_CONFIG)):
        cached_file(place, CONFIG, revision=revision)


def why_unreadable(error: Exception) -> str:
    """Return in one line why transformers could not read a model."""
    if "trust_remote_code=True" in str(error):  # transformers' advice, lines below the first
        return (
            "Python code in the model's repository would have to run. If you trust that code, give "
            "PPOTrainer the loaded model, or set the pipeline's global trust_remote_code=true"
        )
    return in_one_line(error) or type(error).__name__
