"""Checkpoints as directories: a checkpoint is complete or does not exist, and a manifest lists its files.

The module `store` defines the content of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.models.directories import follow_umask
from ppo_rlhf.runtime.whole_files import delete, draft_of, written_whole

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"iteration_(\d+)")


def checkpoint_name(iteration: int) -> str:
    """Return the directory name of an iteration's checkpoint. Sorted names are in the order of iterations."""
    return f"iteration_{iteration:06d}"


def checkpoint_iterations(run_directory: Path) -> list[int]:
    """Return the iterations that have a checkpoint in a run's directory, in ascending order. The checkpoints may be
    damaged.
    """
    names = [_NAME.fullmatch(path.name) for path in run_directory.glob("iteration_*")]
    return sorted(int(match[1]) for match in names if match)


def write_directory(target: Path, iteration: int, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary directory, add a manifest, and rename the complete directory to `target`.

    A kill at any moment leaves earlier checkpoints intact. An existing checkpoint at `target` is replaced.

    Raises:
        OSError: A file or directory cannot be written.
    """
    with written_whole(target, replaces_folder=True) as draft:
        draft.mkdir()
        write(draft)
        sizes = {path.relative_to(draft).as_posix(): _size_and_hash(path) for path in _files(draft)}
        entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sizes.items()}
        manifest = {"format": FORMAT, "run": target.parent.name, "iteration": iteration, "files": entries}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        follow_umask(draft)


def verify_checkpoint(directory: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against the manifest, and return the manifest.

    Raises:
        CheckpointError: A file is missing, truncated, changed or added, or belongs to another checkpoint. The message
            names the file.
    """
    path = directory / MANIFEST
    manifest = read_json(path)
    try:
        format_, iteration = manifest["format"], manifest["iteration"]
        expected = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's manifest ({error!r})") from None
    if format_ != FORMAT:
        raise CheckpointError(f"{path}: format {format_}; this version reads format {FORMAT}")
    match = _NAME.fullmatch(directory.name)
    if match and int(match[1]) != iteration:
        raise CheckpointError(f"{path}: belongs to iteration {iteration}, not to this directory")
    files = {file.relative_to(directory).as_posix(): file for file in _files(directory)}
    for name, size_and_hash in expected.items():
        if name not in files:
            raise CheckpointError(f"{directory / name}: missing, though the manifest lists it")
        if size_and_hash != _size_and_hash(files[name]):
            raise CheckpointError(f"{files[name]}: damaged; its size or SHA-256 differs from the manifest")
    for name, file in files.items():
        # Hidden files come from the file system or the desktop, such as .DS_Store, and are not part of a checkpoint
        is_hidden = any(part.startswith(".") for part in Path(name).parts)
        if name not in expected and name != MANIFEST and not is_hidden:
            raise CheckpointError(f"{file}: not in the manifest; remove the file from the checkpoint")
    return manifest


def verify_checkpoint_of_run(directory: Path) -> None:
    """Check that a checkpoint is intact, and that it was written by the run whose directory contains it.

    Raises:
        CheckpointError: The checkpoint is damaged, or another run wrote it.
    """
    run = verify_checkpoint(directory).get("run")
    if run != directory.parent.name:
        raise CheckpointError(f"{directory / MANIFEST}: belongs to run {run}, not to this directory")


def newest_whole_checkpoint(run_directory: Path) -> Path | None:
    """Return a run's newest intact checkpoint, or None. A warning names each newer checkpoint that is damaged."""
    for iteration in reversed(checkpoint_iterations(run_directory)):
        directory = run_directory / checkpoint_name(iteration)
        try:
            verify_checkpoint_of_run(directory)
        except (CheckpointError, OSError) as error:
            log.warning("A damaged checkpoint is skipped: %s", error)
        else:
            return directory
    return None


def sweep_leftovers(run_directory: Path) -> None:
    """Delete the half-written and half-deleted checkpoints of killed processes.

    Only the process that owns the run may call this function.
    """
    for path in run_directory.glob(draft_of("iteration_*", process="*")):
        delete(path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as a checkpoint's JSON ({error})") from None


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _size_and_hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
