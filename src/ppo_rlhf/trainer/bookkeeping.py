"""Logging, checkpoints and interruption of `PPOTrainer.train`: after each iteration, and after an exception."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from ppo_rlhf.checkpoints import files
from ppo_rlhf.checkpoints.evaluations import write_completions
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.evaluation.during_training import is_due
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.epilogue import Epilogue, in_about
from ppo_rlhf.ppo.experience import Experience, completion_rows
from ppo_rlhf.ppo.precision import precision_warning
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.runtime.progress import Lines, Show, progress_bar, say
from ppo_rlhf.runtime.signals import SAME_REQUEST_S, RunInterruptedError
from ppo_rlhf.trainer.evaluation import HeldOut

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0  # seconds between two log lines; on a terminal, a progress bar shows each iteration's metrics


class Bookkeeper(Epilogue):
    """Saves checkpoints and evaluates the policy in one call of `PPOTrainer.train`; `directory=None` saves nothing."""

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
        """Write this iteration's completions to the directory, if completions of this iteration are to be logged."""
        is_sampled = self.state.config.samples(experience.rollouts.iteration)
        if is_sampled and self._directory is not None and is_main_process():
            write_completions(self._directory, completion_rows(experience, self.state.tokenizer))

    def save_if_due(self) -> bool:
        """Save a checkpoint if a checkpoint is due and there is a directory; return whether a checkpoint was saved."""
        is_saved = self._directory is not None and self.state.checkpoint_due
        if is_saved:
            self.save()
        return is_saved

    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the policy on the held-out prompts if an evaluation is due; return its log row, else None."""
        if self._held_out is None or not is_due(self.state):
            return None
        say(verdict_line(self._held_out.evaluate(self._directory).metrics))
        return self._held_out.rows[-1]

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return the exception that ends training: KeyboardInterrupt, or RunInterruptedError with the reason `why`."""
        return RunInterruptedError(signum, why) if why else KeyboardInterrupt()


@contextmanager
def watched(state: TrainingState, directory: Path | None) -> Iterator[Show]:
    """Yield a function that shows an iteration's metrics; if the block raises, save the last whole iteration.

    A terminal also shows a progress bar, unless logging is set up. Only the main process saves after an error, and uses
    no collective, because processes that failed may never reach a collective.
    """
    lines = Lines(state.iteration, state.total_iterations, LINE_INTERVAL_S)
    try:
        with _finishing_updates(state), nullcontext() if log.hasHandlers() else progress_bar(lines) as show_in_bar:

            def show(iteration: int, metrics: Mapping[str, float]) -> None:
                lines.show(iteration, metrics)
                if show_in_bar is not None:
                    show_in_bar(iteration, metrics)

            yield show
    except BaseException:
        if directory is None or not state.iteration or not is_main_process():
            raise
        try:
            if state.updating:
                log.warning(
                    "No checkpoint is saved: iteration %d was interrupted during its update.", state.iteration + 1
                )
            elif not (directory / files.checkpoint_name(state.iteration)).exists():
                log.warning("The last whole iteration is saved: %s", write_checkpoint(directory, state))
        # Only warn about a checkpoint that cannot be written, so that the exception that ended training is raised
        except CheckpointError as error:
            log.warning("%s", error)
        raise


@contextmanager
def _finishing_updates(state: TrainingState) -> Iterator[None]:
    """Let the first Ctrl-C during a PPO update stop training after the current iteration: half an update cannot be
    saved.

    A SIGINT handler other than Python's default is kept. Outside the main thread the SIGINT handler is kept, too,
    because Python allows no new handler there.
    """
    process, asked_at = os.getpid(), -math.inf

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if not state.updating or os.getpid() != process or (state.requests.signum and now - asked_at > SAME_REQUEST_S):
            raise KeyboardInterrupt
        if not state.requests.signum:
            state.requests.signum, asked_at = signum, now
            # Write with os.write instead of logging, because the signal may have interrupted a logging call
            if is_main_process():
                line = (
                    f"\nCtrl-C: finishing iteration {state.iteration + 1} {in_about(state, None)}, then stopping; a "
                    "second one stops at once.\n"
                )
                os.write(2, line.encode())

    default_handler = signal.default_int_handler
    is_changed = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is default_handler
    )
    if is_changed:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        state.requests.signum = None
        if is_changed:
            signal.signal(signal.SIGINT, default_handler)


def verdict_line(metrics: Mapping[str, float]) -> str:
    """Return an evaluation's win rate, mean rewards and KL in one line."""
    rate, low, high = (100.0 * metrics[f"eval/win_rate{suffix}"] for suffix in ("", "_low", "_high"))
    return (
        f"Held-out prompts: win rate {rate:.0f} % against the reference policy (95 % interval {low:.0f} to {high:.0f} "
        f"%), reward {metrics['eval/reward']:z.3f} (reference {metrics['eval/reward_sft']:z.3f}), "
        f"KL {metrics['eval/kl']:z.2f} nats"
    )


def warn(state: TrainingState, *, evaluates: bool) -> None:
    """Warn, in the main process, of settings that are unusual, slow on this device, or without effect in PPOTrainer."""
    if not is_main_process():
        return
    for line in state.config.advice(parameters=state.policy.num_parameters()):
        log.warning("%s", line)
    if slow_dtype := precision_warning(state.config, state.device):
        log.warning("%s", slow_dtype)
    without_effect = {"shutdown_grace_s": ", where a second Ctrl-C ends the wait"}
    if not evaluates:
        without_effect["eval_interval"] = " without evaluation_prompts"
    for name, why in without_effect.items():
        if name in state.config.not_default():
            log.warning("ppo.%s: no effect in PPOTrainer%s", name, why)
