"""Errors of ours as Kedro hands them on: a dataset's error arrives as the cause of a DatasetError."""

from __future__ import annotations

from ppo_rlhf.core.errors import PPORLHFError


def own_error(error: BaseException) -> PPORLHFError | None:
    """Return the error of ours that `error` is or was caused by, None if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PPORLHFError):
        cause = cause.__cause__
    return cause
