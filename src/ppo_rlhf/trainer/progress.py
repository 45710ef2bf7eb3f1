"""The progress of PPOTrainer's training: what is kept of it in a folder, and what a script sees of it."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from ppo_rlhf.checkpoints import files
from ppo_rlhf.checkpoints.records import write_completions
from ppo_rlhf.checkpoints.store import CheckpointRequest, write_checkpoint
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.evaluation.during_training import is_due
from ppo_rlhf.locks import lock_run
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.experience import Experience, completion_rows
from ppo_rlhf.ppo.precision import precision_warning
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import from_all, is_main_process, on_main
from ppo_rlhf.progress import Lines, Show, readings, say
from ppo_rlhf.signals import SAME_REQUEST_S, RunInterruptedError, time_is_over
from ppo_rlhf.trainer.evaluation import HeldOut

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0  # a terminal has a bar beside the lines


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


@dataclass
class Bookkeeper:
    """Keeps the records of one call of `train`; the pipeline's runner does the same in the same order."""

    state: TrainingState
    held_out: HeldOut | None
    callbacks: Callbacks
    directory: Path | None  # the folder of the checkpoints
    save: Callable[[], None]
    show: Show

    def begin(self, *, is_resumed: bool) -> None:
        """Before the first iteration: a checkpoint was saved before its evaluation, which is made up for."""
        if not self.state.finished:
            self.callbacks.begin()
        if is_resumed and self.state.iteration:
            self._evaluate_if_due()

    def before_update(self, experience: Experience) -> None:
        """Keep the completions of a sampled iteration."""
        is_sampled = self.state.config.samples(experience.rollouts.iteration)
        if is_sampled and self.directory is not None and is_main_process():
            write_completions(self.directory, completion_rows(experience))

    def after_iteration(self, metrics: dict[str, float]) -> None:
        """Record one iteration."""
        state = self.state
        self.show(state.iteration, metrics)
        is_saved = self.directory is not None and CheckpointRequest(state).due
        if is_saved:
            self.save()
        self.callbacks.iteration_ended(metrics, is_saved=is_saved)
        if state.stopping:
            raise KeyboardInterrupt
        self._evaluate_if_due()
        if state.config.max_time is None or state.finished:
            return
        if why := next(filter(None, from_all(time_is_over(state.config.max_time))), ""):
            state.stopping = True
            if not is_saved:
                self.save()
            say(f"{why} are over: iteration {state.iteration} is saved in {self.directory}")
            raise RunInterruptedError(signal.SIGTERM, why)

    def _evaluate_if_due(self) -> None:
        if self.held_out is not None and is_due(self.state):
            say(verdict_line(self.held_out.evaluate(self.directory).metrics))
            self.callbacks.evaluated(self.held_out.rows[-1])


@contextmanager
def watched(state: TrainingState, directory: Path | None) -> Iterator[Show]:
    """Yield a function that shows an iteration; save the last one on an error.

    Beside the lines a terminal has a bar, if logging is not set up. Only the main process saves: the others may never
    get here.
    """
    hidden = True if log.hasHandlers() or not is_main_process() else None
    done, total = state.iteration, state.total_iterations
    lines = Lines(done, total, LINE_INTERVAL_S)
    try:
        with _finishing_updates(state), tqdm(desc="PPO", initial=done, total=total, disable=hidden) as bar:

            def show(iteration: int, metrics: Mapping[str, float]) -> None:
                lines.show(iteration, metrics)
                bar.set_postfix_str(", ".join(readings(metrics)[:2]), refresh=False)
                bar.update()

            yield show
    except BaseException:
        if directory is None or not state.iteration or not is_main_process():
            raise
        try:
            if state.updating:
                log.warning("Nothing is saved: iteration %d was half-way through its update.", state.iteration + 1)
            elif not (directory / files.checkpoint_name(state.iteration)).exists():
                log.warning("The last whole iteration is saved: %s", write_checkpoint(directory, state))
        except CheckpointError as error:  # the exception that ends the training counts more
            log.warning("%s", error)
        raise


@contextmanager
def _finishing_updates(state: TrainingState) -> Iterator[None]:
    """Let the first Ctrl-C in an update ask for the end after this iteration: half an update cannot be saved.

    A handler that is not Python's own stays, and so does one outside the main thread, where Python allows no change.
    """
    process, asked_at = os.getpid(), -math.inf

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if not state.updating or os.getpid() != process or (state.stop_requested and now - asked_at > SAME_REQUEST_S):
            raise KeyboardInterrupt
        if not state.stop_requested:
            state.stop_requested, asked_at = True, now
            if is_main_process():  # no logging: it may be what the signal interrupted
                line = (
                    f"\nCtrl-C: finishing iteration {state.iteration + 1}, then stopping; a second one stops at once.\n"
                )
                os.write(2, line.encode())

    own = signal.default_int_handler
    is_changed = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is own
    if is_changed:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        state.stop_requested = False
        if is_changed:
            signal.signal(signal.SIGINT, own)


def say_where(directory: Path, state: TrainingState) -> None:
    """Say where the checkpoint of a training that ended is; a training that was complete before may have none here."""
    checkpoint = directory / files.checkpoint_name(state.iteration)
    if is_main_process() and checkpoint.exists():
        say(f"The last checkpoint is {checkpoint}")


def verdict_line(metrics: Mapping[str, float]) -> str:
    """Return an evaluation's metrics at a glance."""
    rate, low, high = (100.0 * metrics[f"eval/win_rate{end}"] for end in ("", "_low", "_high"))
    return (
        f"Held-out prompts: win rate {rate:.0f} % against the reference policy (95 % interval {low:.0f} to {high:.0f} "
        f"%), reward {metrics['eval/reward']:z.3f} (reference {metrics['eval/reward_sft']:z.3f}), "
        f"KL {metrics['eval/kl']:z.2f} nats"
    )


def warn(state: TrainingState, *, evaluates: bool) -> None:
    """Log, in the main process, settings that are unusual, slow on this device, or of no effect in PPOTrainer."""
    if not is_main_process():
        return
    config, slow = state.config, precision_warning(state.config, state.device)
    for line in [*config.advice(parameters=state.policy.num_parameters()), *([slow] if slow else [])]:
        log.warning("%s", line)
    idle = {} if evaluates else {"eval_interval": " without evaluation_prompts"}
    for name, why in {**idle, "shutdown_grace_s": ", where a second Ctrl-C ends the wait"}.items():
        if name in config.not_default():
            log.warning("ppo.%s: no effect in PPOTrainer%s", name, why)
