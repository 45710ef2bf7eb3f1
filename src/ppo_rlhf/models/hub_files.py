"""Single files of a model, from its directory or from the hub and its cache, and why one cannot be read."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers.utils import cached_file

from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.models.directories import ADAPTER_CONFIG, CONFIG

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0


@cache
def hub_answers() -> bool:
    """Return whether the hub answers; without an answer the cache alone is read for the rest of the process.

    The client repeats each question for half a minute, also for files that are in the cache.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except OfflineModeIsEnabled:
        return False
    except Exception as error:  # of the client's library, which was requests and is httpx
        log.warning("%s does not answer (%s): models are read from the cache.", constants.ENDPOINT, in_one_line(error))
        return False
    return True


def find_file(place: str, revision: str, name: str, *, local_files_only: bool = False) -> Path | None:
    """Return a file of a model, from the hub if need be; None if it is not there."""
    try:
        found = cached_file(
            place,
            name,
            revision=revision,
            local_files_only=local_files_only or Path(place).is_dir() or not hub_answers(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no such repository, or a gated one: whatever reads the model says so
        return None
    return None if found is None else Path(found)


def check_on_hub(place: str, revision: str) -> None:
    """Raise `OSError` if the hub does not have a model, or does not answer and the cache has nothing of it."""
    if not any(find_file(place, revision, name, local_files_only=True) for name in (CONFIG, ADAPTER_CONFIG)):
        cached_file(place, CONFIG, revision=revision, local_files_only=not hub_answers())


def why_unreadable(error: Exception) -> str:
    """Return in one line why transformers could not read a model."""
    if "trust_remote_code=True" in str(error):  # transformers' advice, lines below the first
        return (
            "Python code in the model's repository would have to run. If you trust that code, give "
            "PPOTrainer the loaded model, or set the pipeline's global trust_remote_code=true"
        )
    return in_one_line(error) or type(error).__name__
