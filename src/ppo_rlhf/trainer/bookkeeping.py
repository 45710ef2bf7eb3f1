"""What one call of PPOTrainer.train keeps: its folder, and after each iteration a line, a checkpoint, an evaluation."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ppo_rlhf.checkpoints import files
from ppo_rlhf.checkpoints.records import prune_run, write_completions
from ppo_rlhf.checkpoints.store import CheckpointRequest
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.evaluation.during_training import is_due
from ppo_rlhf.locks import lock_run
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.samples import completion_rows
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import from_all, is_main_process, on_main
from ppo_rlhf.signals import RunInterruptedError, time_is_over
from ppo_rlhf.trainer.evaluation import HeldOut
from ppo_rlhf.trainer.progress import in_one_line, say, verdict_line


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


def _lock(directory: Path, held: ExitStack) -> None:
    file = lock_run(directory)
    if file is None:
        raise CheckpointError(f"output_dir={directory}: another process trains there; give another directory")
    held.enter_context(file)


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


@dataclass
class Bookkeeper:
    """Keeps the records of one call of `train`; the pipeline's runner does the same in the same order."""

    state: TrainingState
    held_out: HeldOut | None
    callbacks: Callbacks
    directory: Path | None
    """The folder of the checkpoints."""
    save_to: Callable[[Path], Path]
    bar: tqdm

    def begin(self, *, is_resumed: bool) -> None:
        """Before the first iteration: a checkpoint was saved before its evaluation, which is made up for."""
        if is_resumed and self.state.iteration:
            self._evaluate_if_due()
        if not self.state.finished:
            self.callbacks.begin()
            self.callbacks.settle(self._save)

    def before_update(self, experience: Experience) -> None:
        """Keep the completions of a sampled iteration."""
        is_sampled = self.state.config.samples(experience.rollouts.iteration)
        if is_sampled and self.directory is not None and is_main_process():
            write_completions(self.directory, completion_rows(experience))

    def after_iteration(self, metrics: dict[str, float]) -> None:
        """Record one iteration."""
        state = self.state
        say(in_one_line(state, metrics))
        self.bar.update()
        is_saved = self.directory is not None and CheckpointRequest(state).due
        if is_saved:
            self._save()
        self.callbacks.iteration_ended(metrics, is_saved=is_saved)
        self.callbacks.settle(self._save)
        self._evaluate_if_due()
        if state.config.max_time is None or state.finished:
            return
        if why := next(filter(None, from_all(time_is_over(state.config.max_time))), ""):
            state.stopping = True
            if not is_saved:
                self._save()
            say(f"{why} are over: iteration {state.iteration} is saved in {self.directory}")
            raise RunInterruptedError(signal.SIGTERM, why)

    def _evaluate_if_due(self) -> None:
        if self.held_out is not None and is_due(self.state):
            say(verdict_line(self.held_out.evaluate(self.directory).metrics))
            self.callbacks.evaluated(self.held_out.rows[-1])
            self.callbacks.settle(self._save)

    def _save(self) -> None:
        if self.directory is not None:
            self.save_to(self.directory)
            if is_main_process():
                prune_run(self.directory, self.state.config, self.state.iteration)
