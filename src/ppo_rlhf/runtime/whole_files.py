"""Atomic writes: other processes never see a partly written file or folder."""

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
"""A draft older than `ABANDONED_S` seconds is deleted, because its process was killed on another machine."""


@contextmanager
def written_whole(target: Path, *, replaces_folder: bool = False) -> Iterator[Path]:
    """Yield a draft, a hidden path beside `target` to write to, and publish the draft as `target` after the block.

    An existing file `target` is replaced. If the block fails, `target` does not change. Drafts of killed processes are
    deleted.

    Raises:
        OSError: The draft cannot be written, or `target` is a non-empty folder and `replaces_folder` is False.
    """
    with drafted(target) as draft:
        yield draft
        publish(draft, target, replaces_folder=replaces_folder)


@contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """Yield a draft, a hidden path beside `target` to write to. The block calls `publish` to rename the draft.

    An unpublished draft is deleted after the block. Drafts of killed processes are deleted before the block.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # The last "*" matches the ending -journal of SQLite's journal beside a draft
    for old in target.parent.glob(draft_of("*", process="*") + "*"):
        # FileNotFoundError: another process has just renamed the draft to its final name
        with suppress(FileNotFoundError):
            match = re.search(rf"\.{re.escape(platform.node())}-(\d+)\.draft", old.name)
            has_ended = match is not None and not psutil.pid_exists(int(match[1]))
            if has_ended or time.time() - old.stat().st_mtime > ABANDONED_S:
                delete(old)
    draft = target.with_name(draft_of(target.name))
    delete(draft)  # delete the draft of an earlier process that had the same process id
    try:
        yield draft
    finally:
        delete(draft)


def publish(draft: Path, target: Path, *, replaces_folder: bool = False) -> None:
    """Sync a draft to disk and rename it to `target`.

    Raises:
        OSError: As `written_whole`.
    """
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    if replaces_folder and (target.exists() or target.is_symlink()):
        discard(target)
    draft.replace(target)
    sync(target.parent)


def draft_of(name: str, process: str | None = None) -> str:
    """Return the hidden name of a process's draft of the file `name`; `process` defaults to this process."""
    return f".{name}.{process or process_name()}.draft"


def discard(folder: Path) -> None:
    """Delete a folder, after renaming it, so that other processes never see a partly deleted folder."""
    delete(folder.rename(folder.with_name(draft_of(f"{folder.name}.old"))))


def process_name() -> str:
    """Return a name that is unique among the processes of all machines that share a disk."""
    return f"{platform.node()}-{os.getpid()}"


def delete(path: Path) -> None:
    """Delete a file, a link or a folder; do nothing if the path does not exist. What a link names stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
