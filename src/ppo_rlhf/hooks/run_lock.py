"""Who owns a run's directory, and who may open the store: locks that the kernel frees when their process dies."""

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

_held: set[int] = set()


class RunLock:
    """The lock `run.lock` in the directory of one run's checkpoints, held for as long as the run lives.

    It belongs to the open file: if the process dies, whatever kills it, the kernel frees it. A process forked from
    this one (a data loader's worker) does not share it, or it would outlive the run.
    """

    def __init__(self, descriptor: int, path: Path, is_new: bool) -> None:
        """Take over an open, locked file; use `take`."""
        self._descriptor: int | None = descriptor
        self._path = path
        self._is_new = is_new
        _held.add(descriptor)

    @classmethod
    def take(cls, directory: Path) -> RunLock | None:
        """Return the lock of a run's directory, which is made if it is not there; None while another process holds it.

        Raises:
            CheckpointError: The directory or the file cannot be written.
        """
        path = directory / LOCK_FILE
        while True:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                is_new = not path.exists()
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be written, so no checkpoint could: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError as error:  # a file system without locks
                logger.warning("%s cannot be locked (%s): let no other run resume this one.", path, error.strerror)
            if _is_at(descriptor, path):
                return cls(descriptor, path, is_new)
            os.close(descriptor)  # `give_back` of another process took the file away in between

    def release(self) -> None:
        """Let others have the run."""
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def give_back(self) -> None:
        """Release a lock that came to nothing, and leave the directory as it was."""
        if self._descriptor is not None and self._is_new:
            self._path.unlink(missing_ok=True)
        self.release()


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time through the block; others wait. The lock is on the folder itself, no file is made.

    A network file system may refuse to lock a folder: then nobody waits.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
