"""Atomic writes: other processes never see a partly written file or folder."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ppo_rlhf.runtime.locks import take_lock

DRAFT, LOCK_FILE = "draft", "lock"
_FOLDER = re.compile(r"\..+\.[0-9a-f]{16}\.draft")


@contextmanager
def written_whole(target: Path, *, replaces_folder: bool = False) -> Iterator[Path]:
    """Yield a draft, a path in a hidden folder beside `target` to write to, and publish it as `target` after the block.

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
    """Yield a draft, a path in a hidden folder beside `target` to write to. The block calls `publish` to rename it.

    An unpublished draft is deleted after the block. Drafts of killed processes are deleted before the block.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    delete_abandoned_drafts(target.parent)
    folder, lock = _new_folder(target)
    try:
        with lock:
            yield folder / DRAFT
    finally:
        _delete_folder(folder)


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


def replace_text(target: Path, text: str) -> None:
    """Write a small file that only this process writes, by a rename and without a sync: a kill leaves it old or new.

    A loss of power may leave the old text: for what can be found out again, such as how far a copy has come.

    Raises:
        OSError: The file cannot be written.
    """
    draft = target.with_name(f".{target.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)


def discard(folder: Path) -> None:
    """Delete a folder, after renaming it, so that other processes never see a partly deleted folder."""
    with drafted(folder) as draft:
        folder.rename(draft)


def delete_abandoned_drafts(parent: Path) -> None:
    """Delete the drafts in `parent` whose writers have ended.

    A writer has ended if its draft's lock is free. A host name and a process id cannot tell: two containers may share
    both. If the file system has no locks, no draft is deleted.
    """
    for folder in [path for path in parent.glob(".*.draft") if _FOLDER.fullmatch(path.name)]:
        # OSError: the draft was deleted meanwhile, belongs to another user, or cannot be locked
        with suppress(OSError):
            if not (folder / LOCK_FILE).exists():
                folder.rmdir()  # its writer was killed before it made the lock, or the writer makes another folder
                continue
            # A network file system locks only files that are open for writing
            with (folder / LOCK_FILE).open("r+b") as lock:
                if not take_lock(lock):
                    continue
                _delete_folder(folder)


def _new_folder(target: Path) -> tuple[Path, IO[bytes]]:
    """Make a hidden folder beside `target` with a name that no other draft has; return it and its locked file."""
    while True:
        folder = target.with_name(f".{target.name}.{secrets.token_hex(8)}.draft")
        folder.mkdir()
        try:
            lock = (folder / LOCK_FILE).open("ab")
        except FileNotFoundError:
            continue  # another process has deleted the folder, which had no lock yet
        is_locked = True
        with suppress(OSError):  # the file system has no locks
            is_locked = take_lock(lock)
        # Before the lock was taken another process may have locked the file, and deleted the folder
        if is_locked and (folder / LOCK_FILE).exists():
            return folder, lock
        lock.close()


def _delete_folder(folder: Path) -> None:
    """Delete a draft's folder, the lock file last: what a killed process leaves of it is still a draft."""
    for path in folder.glob(f"{DRAFT}*"):  # a draft of SQLite's has a journal beside it
        delete(path)
    delete(folder)


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
