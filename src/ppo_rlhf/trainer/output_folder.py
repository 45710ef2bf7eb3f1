"""The folder of a PPOTrainer's run: held by one process, of one run, with checkpoints to resume from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ppo_rlhf.checkpoints import files
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.locks import lock_run
from ppo_rlhf.runtime.processes import is_main_process, on_main
from ppo_rlhf.runtime.progress import say


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from training in a directory.

    Raises:
        CheckpointError: Another process trains there.
    """
    with ExitStack() as held:

        def lock() -> None:
            file = lock_run(directory)
            if file is None:
                raise CheckpointError(f"output_dir={directory}: another process trains there; give another directory")
            held.enter_context(file)

        on_main(lock)
        yield


def claim(folder: Path, own: set[Path]) -> None:
    """Add a folder to those that hold this run; raise `ConfigError` if it holds another one."""
    newest = on_main(lambda: files.checkpoint_iterations(folder))[-1:]
    if newest and folder.resolve() not in own:
        raise ConfigError(
            f"{folder} holds another run, up to iteration {newest[0]}: resume that run by "
            "train(resume_from_checkpoint=True, output_dir=…), or give a new run another folder"
        )
    own.add(folder.resolve())


def checkpoint_to_resume(asked: str | Path | bool, output_dir: Path | None) -> Path:
    """Return the checkpoint that `train(resume_from_checkpoint=asked)` names.

    Raises:
        ConfigError: `asked` is True, and there is no `output_dir`.
        CheckpointError: That directory has no whole checkpoint, or `asked` is the directory of a run.
    """
    if not isinstance(asked, bool):
        checkpoint = Path(asked).expanduser()
        if files.checkpoint_iterations(checkpoint):
            raise CheckpointError(f"{asked} is a run's directory: name a checkpoint in it, or give True and output_dir")
        return checkpoint
    if output_dir is None:
        raise ConfigError("train: resume_from_checkpoint=True looks in output_dir; give that, or the checkpoint itself")
    newest = on_main(partial(files.newest_whole_checkpoint, output_dir))
    if newest is None:
        raise CheckpointError(f"{output_dir}: this directory has no whole checkpoint to resume from")
    return newest


def say_where(directory: Path, state: TrainingState) -> None:
    """Say where the checkpoint of a training that ended is; a training that was complete before may have none here."""
    checkpoint = directory / files.checkpoint_name(state.iteration)
    if is_main_process() and checkpoint.exists():
        say(f"The last checkpoint is {checkpoint}")
