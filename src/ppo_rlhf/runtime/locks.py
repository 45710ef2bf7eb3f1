"""Locks between processes: on a run's directory while it trains, and on a folder for short work that must not meet."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from weakref import WeakSet

from ppo_rlhf.core.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
SLOW_S = 2.0
"""Who waits longer for a folder says so."""
_held: WeakSet[IO[bytes]] = WeakSet()  # the locked files of this process


def lock_run(directory: Path) -> IO[bytes] | None:
    """Return the locked file `run.lock` of a run's directory, which is made if needed; None if another process has it.

    Closing the file frees it, and so does the end of the process. It belongs to this opened file: a POSIX record lock
    would be freed by whatever reads the file in this process, such as a copy of the directory. A forked worker closes
    its copy at once, or the lock would outlive a killed run. A directory that is made appears with the lock: a run that
    looks for one to resume must not take one that just begins.

    Raises:
        CheckpointError: The directory or the file cannot be written.
    """
    path = directory / LOCK_FILE
    place = directory if directory.exists() else directory.with_name(f".{directory.name}.new")
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = (place / LOCK_FILE).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            return None
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): let no other run resume this one.", path, error.strerror)
        if place != directory:
            place.replace(directory)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written, so no checkpoint could: {error.strerror}") from error
    _held.add(file)
    return file


def _close_held() -> None:
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_close_held)


def is_let_go(directory: Path) -> bool:
    """Return whether a run's directory has a lock that no process holds; False where files cannot be locked."""
    try:
        with (directory / LOCK_FILE).open("r+b") as file:  # a network file system locks only what may be written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block; others wait, and say so. The lock is on the folder, no file is made.

    A network file system may refuse to lock a folder: then nobody waits.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    line = "Waiting for another process that has locked %s: a run that starts or registers its model, or `kedro clean`."
    waits = threading.Timer(SLOW_S, logger.warning, [line, folder])
    waits.daemon = True
    try:
        waits.start()
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        waits.cancel()
        yield
    finally:
        waits.cancel()  # also if a signal ended the wait
        os.close(descriptor)
