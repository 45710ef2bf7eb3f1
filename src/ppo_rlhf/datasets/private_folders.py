"""Writing out of sight: into a folder of this process's own, then under its name in one step.

Another process sees what is whole or nothing, and two that write to one place do not mix. A killed process leaves its
folder behind; the next one that writes there clears it away. Whether a folder's process still lives is told by a file
lock, which ends with the process wherever it ran: process ids mean nothing across machines and containers.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".unfinished-"
_LOCK = ".lock"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Give a new hidden folder below `parent`, which is made if it is missing; the folder goes when the block ends.

    Those that killed processes left in `parent` go first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def put(whole: Path, target: Path) -> None:
    """Rename a finished file or folder to `target`, once all of it is on the disk; a file there is replaced.

    Raises:
        OSError: It cannot be written out, or `target` is a folder that is not empty.
    """
    for path in [*whole.rglob("*"), whole]:
        _sync(path)
    os.replace(whole, target)
    _sync(target.parent)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = _lock(folder)
        except OSError:  # its process lives, or it is gone, or it is another person's, or no locks can be had here
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            return folder, _lock(folder)
        except (BlockingIOError, FileNotFoundError):  # swept by another process before it was locked
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return folder, None  # nobody else gets a lock there either, so nobody sweeps


def _lock(folder: Path) -> int:
    """Lock a folder and return the open file that holds the lock; raise OSError if that cannot be done at once."""
    path = folder / _LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(errno.ENOENT, "the file that was locked is not there any more", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
