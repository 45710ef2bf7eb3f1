"""Writing a file or a folder so that nobody ever sees half of it."""

import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ABANDONED_S = 24 * 3600
"""A draft this old belongs to a process that was killed on another machine."""


@contextmanager
def written_whole(target: Path, *, replaces_folder: bool = False) -> Iterator[Path]:
    """Yield a hidden path beside `target` to write to; after the block it is on the disk and is renamed to `target`.

    A file that was there is replaced. If the block fails, nothing changes. Drafts of killed processes are deleted.

    Raises:
        OSError: It cannot be written, or `target` is a folder that is not empty, unless a folder is to be replaced.
    """
    with drafted(target) as draft:
        yield draft
        publish(draft, target, replaces_folder=replaces_folder)


@contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """Yield a hidden path beside `target` to write to, and let the block `publish` it; what is left there is deleted.

    Drafts of killed processes are deleted.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.glob(draft_of("*", process="*") + "*"):  # SQLite adds -journal
        with suppress(FileNotFoundError):  # another process has just renamed it
            number = re.search(rf"\.{re.escape(platform.node())}-(\d+)\.draft", old.name)
            has_ended = number is not None and not psutil.pid_exists(int(number[1]))
            if has_ended or time.time() - old.stat().st_mtime > ABANDONED_S:
                delete(old)
    draft = target.with_name(draft_of(target.name))
    delete(draft)  # of a process that had the same number
    try:
        yield draft
    finally:
        delete(draft)


def publish(draft: Path, target: Path, *, replaces_folder: bool = False) -> None:
    """Rename a draft to `target` once it is on the disk.

    Raises:
        OSError: As `written_whole`.
    """
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    if replaces_folder and target.exists():
        discard(target)
    draft.replace(target)
    sync(target.parent)


def draft_of(name: str, process: str | None = None) -> str:
    """Return the hidden name under which a process, by default this one, writes a file of this name."""
    return f".{name}.{process or process_name()}.draft"


def discard(folder: Path) -> None:
    """Delete a folder; its name goes first, so that nobody finds half of it."""
    delete(folder.rename(folder.with_name(draft_of(f"{folder.name}.old"))))


def process_name() -> str:
    """Return a name that no other process has, on this machine or on another one that shares its disk."""
    return f"{platform.node()}-{os.getpid()}"


def delete(path: Path) -> None:
    """Delete a file or a folder; nothing happens if it is not there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
