"""The folder in which PPOTrainer keeps a run: one process trains in it, and it holds one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ppo_rlhf.checkpoints import files
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.locks import lock_run
from ppo_rlhf.processes import on_main


class RunFolders:
    """The folders that hold this run's checkpoints."""

    def __init__(self) -> None:
        self._own: set[Path] = set()

    def add(self, folder: Path) -> None:
        """Note that a folder holds this run."""
        self._own.add(folder.resolve())

    def take(self, folder: Path) -> None:
        """Make a folder this run's.

        Raises:
            ConfigError: It holds another run.
        """
        newest = on_main(lambda: files.checkpoint_iterations(folder))[-1:]
        if newest and folder.resolve() not in self._own:
            raise ConfigError(
                f"{folder} holds another run, up to iteration {newest[0]}: resume that run by "
                "train(resume_from_checkpoint=True, output_dir=…), or give a new run another folder"
            )
        self.add(folder)


@contextmanager
def locked(directory: Path | None) -> Iterator[None]:
    """Keep other processes from training in a directory; None: there is nothing to lock.

    Raises:
        CheckpointError: Another process trains there.
    """
    with ExitStack() as held:
        if directory is not None:
            on_main(partial(_lock, directory, held))
        yield


def checkpoint_to_resume(asked: str | Path | bool, output_dir: Path | None) -> Path:
    """Return the checkpoint that `train(resume_from_checkpoint=asked)` names.

    Raises:
        ConfigError: `asked` is True, and there is no `output_dir`.
        CheckpointError: That directory has no whole checkpoint.
    """
    if not isinstance(asked, bool):
        return Path(asked)
    if output_dir is None:
        raise ConfigError("train: resume_from_checkpoint=True looks in output_dir; give that, or the checkpoint itself")
    newest = on_main(partial(files.newest_whole_checkpoint, output_dir))
    if newest is None:
        raise CheckpointError(f"{output_dir}: this directory has no whole checkpoint to resume from")
    return newest


def _lock(directory: Path, held: ExitStack) -> None:
    file = lock_run(directory)
    if file is None:
        raise CheckpointError(f"output_dir={directory}: another process trains there; give another directory")
    held.enter_context(file)
