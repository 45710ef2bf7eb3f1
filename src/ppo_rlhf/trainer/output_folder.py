"""The output directory of a PPOTrainer's run: its lock, its checkpoints, and the check that it holds no other run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ppo_rlhf.checkpoints import files
from ppo_rlhf.checkpoints.store import mark_of
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.runtime.locks import lock_run
from ppo_rlhf.runtime.metrics_file import metrics_of
from ppo_rlhf.runtime.processes import is_main_process, on_main
from ppo_rlhf.runtime.progress_display import say


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory, so that no other process trains in the directory.

    Raises:
        CheckpointError: Another process trains in the directory.
    """
    with ExitStack() as stack:

        def lock() -> None:
            file = lock_run(directory)
            if file is None:
                raise CheckpointError(f"output_dir={directory}: another process trains there; give another directory")
            stack.enter_context(file)

        on_main(lock)
        yield


def claim(folder: Path, run_folders: Mapping[Path, Path | None]) -> None:
    """Let the run go on in a folder: the lines of its metrics.jsonl behind the run's checkpoint are set aside.

    `run_folders` are the folders that hold this run, each with the checkpoint at which the run goes on; None: there the
    run is in step. The main process calls `claim`.

    Raises:
        ConfigError: The folder holds another run, or a newer checkpoint of this run.
        CheckpointError: metrics.jsonl is damaged.
    """
    home = folder.resolve()
    newest = files.checkpoint_iterations(folder)[-1:]
    if newest and home not in run_folders:
        raise ConfigError(
            f"{folder} holds another run, up to iteration {newest[0]}: resume that run with "
            "train(resume_from_checkpoint=True, output_dir=…), or give this run another folder"
        )
    checkpoint = run_folders.get(home)
    if checkpoint is None and home in run_folders:
        return
    if checkpoint is not None:
        files.check_newest(checkpoint)
    metrics_of(folder).cut(mark_of(checkpoint, folder))


def checkpoint_to_resume(resume_from: str | Path | bool, output_dir: Path | None) -> Path:
    """Return the checkpoint that `train(resume_from_checkpoint=resume_from)` names.

    Raises:
        ConfigError: `resume_from` is True, and there is no `output_dir`.
        CheckpointError: `output_dir` has no whole checkpoint, or `resume_from` is the directory of a run.
    """
    if not isinstance(resume_from, bool):
        checkpoint = Path(resume_from).expanduser()
        if files.checkpoint_iterations(checkpoint):
            raise CheckpointError(
                f"{resume_from} is a run's directory: give one of its checkpoints, or True with output_dir"
            )
        return checkpoint
    if output_dir is None:
        raise ConfigError(
            "train: resume_from_checkpoint=True needs output_dir; give output_dir, or the checkpoint's path"
        )
    newest = on_main(partial(files.newest_whole_checkpoint, output_dir))
    if newest is None:
        raise CheckpointError(f"{output_dir}: this directory has no whole checkpoint to resume from")
    return newest


def say_where(directory: Path, progress: Progress) -> None:
    """Print the path of the last checkpoint after training, if the last checkpoint is in `directory`.

    If a run was complete before `train` was called, its last checkpoint may be in another directory.
    """
    checkpoint = directory / files.checkpoint_name(progress.iteration)
    if is_main_process() and checkpoint.exists():
        say(f"The last checkpoint is {checkpoint}")
