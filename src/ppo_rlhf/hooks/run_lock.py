"""The lock on a run's directory, and the one on the project's folder while a tracking database is made."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ppo_rlhf.core.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


class RunLock:
    """The lock `run.lock` in the directory of one run's checkpoints, held while the run lives.

    It is a POSIX record lock: the kernel frees it when the process dies, and a forked worker does not inherit it.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over an open, locked file; use `take`."""
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, directory: Path) -> RunLock | None:
        """Return the lock of a run's directory, which is made if needed; None while another process holds it.

        Raises:
            CheckpointError: The directory or the file cannot be written.
        """
        path = directory / LOCK_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written, so no checkpoint could: {error.strerror}") from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): let no other run resume this one.", path, error.strerror)
        return cls(descriptor)

    def release(self) -> None:
        """Let other processes have the run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block; others wait. The lock is on the folder itself, no file is made.

    A network file system may refuse to lock a folder: then nobody waits.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
