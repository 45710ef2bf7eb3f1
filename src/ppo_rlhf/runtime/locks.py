"""Locks between processes: on a run's directory while the run trains, on a draft, and on a folder during short work.

The library filelock is not used, because its lock outlives a killed run if a worker that the run forked lives on.
"""

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
"""A process that waits longer than `SLOW_S` seconds for the lock on a folder logs a warning."""
_held: WeakSet[IO[bytes]] = WeakSet()  # the open lock files whose locks this process holds


def lock_run(directory: Path) -> IO[bytes] | None:
    """Return the locked file `run.lock` of a run's directory; None if another process holds the lock.

    The lock on the run is released when `run.lock` is closed or the process ends. The lock belongs to the opened file,
    as a `flock` does: a POSIX record lock would be released when this process closes any other handle
    of the file, for example after copying the directory. A missing directory is created together with the lock, so that
    another process that looks for a run to resume never sees a new run without its lock.

    Raises:
        CheckpointError: The run's directory or `run.lock` cannot be written.
    """
    path = directory / LOCK_FILE
    folder = directory if directory.exists() else directory.with_name(f".{directory.name}.new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("ab")
        try:
            if not take_lock(file):
                file.close()
                return None
        except OSError as error:  # the file system does not support locks
            logger.warning("%s cannot be locked (%s): let no other process resume this run.", path, error.strerror)
        if folder != directory:
            folder.replace(directory)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written, so checkpoints cannot be: {error.strerror}") from error
    return file


def take_lock(file: IO[bytes]) -> bool:
    """Lock an opened file until it is closed or this process ends; return False if another process holds the lock.

    A forked worker closes its copy of the file at once, so that the lock does not outlive a killed process.

    Raises:
        OSError: The file system does not support locks.
    """
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _held.add(file)
    return True


def _close_held() -> None:
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_close_held)


def is_let_go(directory: Path) -> bool:
    """Return whether a run's directory has a lock file that no process has locked.

    Return False if the file system does not support locks.
    """
    try:
        # A network file system locks only files that are open for writing
        with (directory / LOCK_FILE).open("r+b") as file:
            return take_lock(file)
    except OSError:
        return False


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time run the block; a process that waits for `SLOW_S` seconds logs a warning.

    The lock is on the folder itself, so no lock file is created. If the file system refuses to lock
    a folder, as a network file system may, no process waits.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    line = (
        "Waiting for another process that has locked %s: a run that starts or registers its model, or that "
        "dequantises a GGUF file, `collect_feedback`, or `kedro clean`."
    )
    waits = threading.Timer(SLOW_S, logger.warning, [line, folder])
    waits.daemon = True
    try:
        waits.start()
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        waits.cancel()
        yield
    finally:
        waits.cancel()  # cancel the timer here too, because a signal may have interrupted the wait for the lock
        os.close(descriptor)
