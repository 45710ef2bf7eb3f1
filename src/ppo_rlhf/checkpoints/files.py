"""Checkpoints as directories: a checkpoint is complete or does not exist, and a manifest lists its files.

The module `store` defines the content of a checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.models.directories import follow_umask
from ppo_rlhf.runtime.manifests import MANIFEST, checked_manifest, read_json, write_manifest
from ppo_rlhf.runtime.whole_files import written_whole

log = logging.getLogger(__name__)


def checkpoint_name(iteration: int) -> str:
    """Return the directory name of an iteration's checkpoint. Sorted names are in the order of iterations."""
    return f"iteration_{iteration:06d}"


def checkpoint_iterations(run_directory: Path) -> list[int]:
    """Return the iterations that have a checkpoint in a run's directory, in ascending order. The checkpoints may be
    damaged.
    """
    found = (_iteration_of(path.name) for path in run_directory.glob("iteration_*"))
    return sorted(iteration for iteration in found if iteration is not None)


def _iteration_of(name: str) -> int | None:
    """Return the iteration of a checkpoint's directory name; None for every name that `checkpoint_name` does not
    give, such as `iteration_7`.
    """
    match = re.fullmatch(r"iteration_([0-9]+)", name)
    iteration = int(match[1]) if match else None
    return iteration if iteration is not None and checkpoint_name(iteration) == name else None


def write_directory(target: Path, iteration: int, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary directory, add a manifest, and rename the complete directory to `target`.

    A kill at any moment leaves earlier checkpoints intact. An existing checkpoint at `target` is replaced.

    Raises:
        OSError: A file or directory cannot be written.
    """
    with written_whole(target, replaces_folder=True) as draft:
        draft.mkdir()
        write(draft)
        write_manifest(draft, run=target.parent.name, iteration=iteration)
        follow_umask(draft)


class Checkpoint:
    """A checkpoint whose files are as they were written: to make one is to check every file against the manifest.

    Whatever reads a checkpoint's files takes a `Checkpoint`, so that no file is read unchecked.

    Attributes:
        directory: The checkpoint's directory.
        iteration: The iteration that the manifest names.
    """

    def __init__(self, directory: Path, part: str = "", *, of_its_run: bool = False) -> None:
        """Check the files; with `part`, only those of this folder in the checkpoint.

        `of_its_run` also checks that the run whose directory contains the checkpoint wrote it.

        Raises:
            CheckpointError: A file is missing, truncated, changed or added, or the checkpoint belongs to another
                iteration or another run. The message names the file.
        """
        manifest, path = checked_manifest(directory, part), directory / MANIFEST
        if type(iteration := manifest.get("iteration")) is not int:
            raise CheckpointError(f"{path}: not a checkpoint's manifest (iteration={iteration!r})")
        self.directory, self.iteration = directory, iteration
        if _iteration_of(directory.name) not in (None, iteration):
            raise CheckpointError(f"{path}: belongs to iteration {iteration}, not to this directory")
        if of_its_run and (run := manifest.get("run")) != directory.parent.name:
            raise CheckpointError(f"{path}: belongs to run {run}, not to this directory")

    def json(self, name: str) -> Any:
        """Return the content of a JSON file of the checkpoint.

        Raises:
            CheckpointError: The file does not exist, or is not JSON.
        """
        return read_json(self.directory / name)


def check_newest(checkpoint: Path) -> None:
    """Refuse to go on from a checkpoint if a newer one is whole, whose metrics would be set aside.

    Raises:
        ConfigError: A newer checkpoint is whole.
    """
    newest, iteration = newest_whole_checkpoint(checkpoint.parent), _iteration_of(checkpoint.name)
    if newest is not None and iteration is not None and iteration < (_iteration_of(newest.name) or 0):
        raise ConfigError(
            f"{checkpoint}: the run has the newer checkpoint {newest.name}, which could not be resumed any more. "
            f"Resume from that, or move the checkpoints after {checkpoint.name} to another folder first"
        )


def newest_whole_checkpoint(run_directory: Path) -> Path | None:
    """Return a run's newest intact checkpoint, or None. A warning names each newer checkpoint that is damaged."""
    for iteration in reversed(checkpoint_iterations(run_directory)):
        try:
            return Checkpoint(run_directory / checkpoint_name(iteration), of_its_run=True).directory
        except CheckpointError as error:
            log.warning("A damaged checkpoint is skipped: %s", error)
    return None
