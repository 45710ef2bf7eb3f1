"""Checkpoints as directories: whole or not there at all, checked by their manifest, the newest and the best kept.

What a checkpoint holds is not this module's business; `store` knows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_rlhf.core.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
_NAME = re.compile(r"iteration_(\d+)")
_LEFTOVER = re.compile(r"\.(iteration_\d+)\.\d+\.(tmp|replaced|deleted)")


def checkpoint_name(iteration: int) -> str:
    """Return the directory name of an iteration's checkpoint; names sort in time."""
    return f"iteration_{iteration:06d}"


def checkpoint_iterations(run_directory: Path) -> list[int]:
    """Return the iterations that a run has checkpoints of, ascending; they may be damaged."""
    names = [_NAME.fullmatch(path.name) for path in run_directory.glob("iteration_*")]
    return sorted(int(match[1]) for match in names if match)


def write_directory(target: Path, iteration: int, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary directory beside `target`, seal it with a manifest, and rename it to `target`.

    A kill at any moment leaves the earlier checkpoints as they were; one of the same name is replaced.

    Raises:
        OSError: A file or directory cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        _write_manifest(temporary, target.parent.name, iteration)
        _replace(target, temporary)
        _sync(target.parent)
    finally:  # whatever ended the writing, a signal too
        shutil.rmtree(temporary, ignore_errors=True)


def verify_checkpoint(directory: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest.

    Raises:
        CheckpointError: A file is missing, was cut off, changed or added, or is another checkpoint's; it is named.
    """
    manifest = _read_manifest(directory)
    name = _NAME.fullmatch(directory.name)
    if name and int(name[1]) != manifest["iteration"]:
        raise CheckpointError(f"{directory / MANIFEST}: is of iteration {manifest['iteration']}, not of this directory")
    for name, expected in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though the manifest lists it")
        if expected != {"bytes": file.stat().st_size, "sha256": _sha256(file)}:
            raise CheckpointError(f"{file}: damaged; size or SHA-256 differs from the manifest")
    for file in _files(directory):
        relative = file.relative_to(directory)
        is_hidden = any(part.startswith(".") for part in relative.parts)  # what a file system or a desktop leaves
        if relative.as_posix() not in manifest["files"] and relative.as_posix() != MANIFEST and not is_hidden:
            raise CheckpointError(f"{file}: is not in the manifest; take it out of the checkpoint")
    return manifest


def verify_checkpoint_of_run(directory: Path) -> None:
    """Check a checkpoint, and that the run whose directory it lies in wrote it.

    Raises:
        CheckpointError: It is damaged, or another run's.
    """
    run = verify_checkpoint(directory)["run"]
    if run != directory.parent.name:
        raise CheckpointError(f"{directory / MANIFEST}: is of run {run}, not of this directory")


def newest_whole_checkpoint(run_directory: Path) -> Path | None:
    """Return a run's newest checkpoint that is whole, None if there is none; damaged ones are named in a warning."""
    for iteration in reversed(checkpoint_iterations(run_directory)):
        directory = run_directory / checkpoint_name(iteration)
        try:
            verify_checkpoint_of_run(directory)
        except (CheckpointError, OSError) as error:
            log.warning("A damaged checkpoint is left out: %s", error)
        else:
            return directory
    return None


def prune_checkpoints(run_directory: Path, keep_newest: int, best: int | None, newest: int | None = None) -> list[Path]:
    """Delete all but the newest checkpoints and the best one of a run; return what was deleted.

    Args:
        run_directory: Holds the checkpoints of one run.
        keep_newest: How many of the newest stay.
        best: Iteration of the best checkpoint, or None if none was evaluated.
        newest: Iteration that the run is at; None takes the last. Later ones are left alone: a run that went back to
            an earlier checkpoint replaces them when it gets there.
    """
    found = [i for i in checkpoint_iterations(run_directory) if newest is None or i <= newest]
    surplus = [run_directory / checkpoint_name(i) for i in found[:-keep_newest] if i != best]
    for path in surplus:
        _delete(path)
    return surplus


def sweep_leftovers(run_directory: Path) -> None:
    """Clear away what a killed process left half written or half deleted. Only the process that owns the run may.

    A checkpoint that was just being replaced gets its name back if its successor did not take it.
    """
    for path in run_directory.glob(".evaluations.json.*.tmp"):
        path.unlink()
    for path in run_directory.glob(".iteration_*"):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        if match[2] == "replaced" and not (run_directory / match[1]).exists():
            path.rename(run_directory / match[1])
        else:
            shutil.rmtree(path)


def _replace(target: Path, new: Path) -> None:
    """Rename `new` to `target`; what stood there is deleted only after that."""
    if not target.exists():
        new.rename(target)
        return
    old = target.rename(target.with_name(f".{target.name}.{os.getpid()}.replaced"))
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _delete(checkpoint: Path) -> None:
    """Take a checkpoint's name away before its files, so that no half of one is ever found."""
    doomed = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.deleted"))
    shutil.rmtree(doomed)


def _write_manifest(directory: Path, run: str, iteration: int) -> None:
    files = _files(directory)
    entries = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    for path in [*files, *(p for p in directory.rglob("*") if p.is_dir())]:
        _sync(path)
    manifest = directory / MANIFEST
    manifest.write_bytes(_sealed({"format": FORMAT, "run": run, "iteration": iteration, "files": entries}))
    _sync(manifest)
    _sync(directory)


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Return a manifest that is exactly as it was written: it carries the hash of its own content."""
    path = directory / MANIFEST
    try:
        text = path.read_bytes()  # as they are: reading text would take a carriage return for a line feed
        content: dict[str, Any] = json.loads(text)
        form = content["format"]
        content.pop("sha256", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's manifest ({error})") from None
    if form != FORMAT:
        raise CheckpointError(f"{path}: format {form}, this version reads format {FORMAT}")
    if text != _sealed(content):
        raise CheckpointError(f"{path}: damaged; its content differs from its own SHA-256")
    return content


def _sealed(content: dict[str, Any]) -> bytes:
    seal = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": seal}, indent=1).encode()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
