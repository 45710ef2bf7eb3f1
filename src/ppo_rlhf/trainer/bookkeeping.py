"""What PPOTrainer's training writes down and shows, of each iteration and when it ends by an exception."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from ppo_rlhf.checkpoints import files
from ppo_rlhf.checkpoints.evaluations import write_completions
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.evaluation.during_training import is_due
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.epilogue import Epilogue
from ppo_rlhf.ppo.experience import Experience, completion_rows
from ppo_rlhf.ppo.precision import precision_warning
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.runtime.progress import Lines, Show, readings, say
from ppo_rlhf.runtime.signals import SAME_REQUEST_S, RunInterruptedError
from ppo_rlhf.trainer.evaluation import HeldOut

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0  # a terminal has a bar beside the lines


class Bookkeeper(Epilogue):
    """Keeps the records of one call of `train` in a folder; without one nothing is saved."""

    def __init__(
        self,
        state: TrainingState,
        callbacks: Callbacks,
        save: Callable[[], None],
        show: Show,
        *,
        held_out: HeldOut | None,
        directory: Path | None,
    ) -> None:
        super().__init__(state, callbacks, save)
        self.show, self._held_out, self._directory = show, held_out, directory

    def before_update(self, experience: Experience) -> None:
        """Keep the completions of a sampled iteration."""
        is_sampled = self.state.config.samples(experience.rollouts.iteration)
        if is_sampled and self._directory is not None and is_main_process():
            write_completions(self._directory, completion_rows(experience, self.state.tokenizer))

    def save_if_due(self) -> bool:
        """Save the iteration if its checkpoint is due and there is a folder; return whether it is saved."""
        is_saved = self._directory is not None and self.state.checkpoint_due
        if is_saved:
            self.save()
        return is_saved

    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the policy on the held-out prompts if that is due, and return the row of their log."""
        if self._held_out is None or not is_due(self.state):
            return None
        say(verdict_line(self._held_out.evaluate(self._directory).metrics))
        return self._held_out.rows[-1]

    def asked_by(self) -> int | None:
        """Return SIGINT if a Ctrl-C came to any process in its update; outside an update it ends training at once."""
        return signal.SIGINT if self.state.stopping else None

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return what Python raises after Ctrl-C, or that `max_time` is over."""
        return RunInterruptedError(signum, why) if why else KeyboardInterrupt()


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
    for line in state.config.advice(parameters=state.policy.num_parameters()):
        log.warning("%s", line)
    if slow := precision_warning(state.config, state.device):
        log.warning("%s", slow)
    without_effect = {"shutdown_grace_s": ", where a second Ctrl-C ends the wait"}
    if not evaluates:
        without_effect["eval_interval"] = " without evaluation_prompts"
    for name, why in without_effect.items():
        if name in state.config.not_default():
            log.warning("ppo.%s: no effect in PPOTrainer%s", name, why)
