"""Logging, checkpoints and interruption of `PPOTrainer.train`: after each iteration, and after an exception."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ppo_rlhf.checkpoints import files
from ppo_rlhf.checkpoints.evaluations import write_completions
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.evaluation.during_training import is_due
from ppo_rlhf.ppo.callbacks import Callbacks
from ppo_rlhf.ppo.checkpointer import Checkpointer
from ppo_rlhf.ppo.experience import Experience, completion_rows
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.precision import precision_warning
from ppo_rlhf.ppo.run_control import RunControl
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.runtime.progress_display import Lines, Show, progress_bar, say
from ppo_rlhf.runtime.signals import RunInterruptedError, finishing_first, raising_on_signals
from ppo_rlhf.trainer.evaluation import HeldOut

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0  # seconds between two log lines; on a terminal, a progress bar shows each iteration's metrics


class Bookkeeper(RunControl):
    """Saves checkpoints and evaluates the policy in one call of `PPOTrainer.train`; `directory=None` saves nothing."""

    def __init__(
        self,
        state: TrainingState,
        callbacks: Callbacks,
        checkpointer: Checkpointer,
        show: Show,
        *,
        held_out: HeldOut | None,
        directory: Path | None,
    ) -> None:
        keeps_best = held_out is not None and held_out.on_exploitation == "stop"
        super().__init__(state.progress, callbacks, checkpointer, keeps_best=keeps_best)
        self._tokenizer = state.sampler.tokenizer
        self.show, self._held_out, self._directory = show, held_out, directory
        self.grace_s = None

    def before_update(self, experience: Experience) -> None:
        """Write this iteration's completions to the directory, if completions of this iteration are to be logged."""
        is_sampled = self.progress.config.samples(experience.rollouts.iteration)
        if is_sampled and self._directory is not None and is_main_process():
            write_completions(self._directory, completion_rows(experience, self._tokenizer))

    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate the policy on the held-out prompts if an evaluation is due; return its log row, else None."""
        if self._held_out is None or not is_due(self.progress):
            return None
        say(verdict_line(self._held_out.evaluate(self._directory).metrics))
        return self._held_out.rows[-1]

    def interruption(self, signum: int, why: str) -> BaseException:
        """Return the exception that ends training: KeyboardInterrupt, or RunInterruptedError with the reason `why`."""
        return RunInterruptedError(signum, why) if why else KeyboardInterrupt()

    @contextmanager
    def heeding_ctrl_c(self) -> Iterator[None]:
        """Let the first Ctrl-C within the block ask the run to stop (`ask`); the second raises KeyboardInterrupt.

        A SIGINT handler other than Python's default is kept.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        try:
            with (
                raising_on_signals([signal.SIGINT], lambda signum: KeyboardInterrupt()),
                finishing_first(None, self.ask, _say_on_stderr),
            ):
                yield
        finally:
            self.progress.requests.signum = None


def _say_on_stderr(line: str) -> None:
    if is_main_process():
        print(f"\n{line}", file=sys.stderr)  # a bar takes what is printed and puts it above itself


@contextmanager
def watched(state: TrainingState, directory: Path | None) -> Iterator[Show]:
    """Yield a function that shows an iteration's metrics; if the block raises, save the last whole iteration.

    A terminal also shows a progress bar, unless logging is set up. Only the main process saves after an error, and uses
    no collective, because processes that failed may never reach a collective.
    """
    lines = Lines(state.progress.iteration, state.progress.total_iterations, LINE_INTERVAL_S)
    try:
        with nullcontext() if log.hasHandlers() else progress_bar(lines) as show_in_bar:

            def show(iteration: int, metrics: Mapping[str, float]) -> None:
                lines.show(iteration, metrics)
                if show_in_bar is not None:
                    show_in_bar(iteration, metrics)

            yield show
    except BaseException:
        if directory is None or not state.progress.iteration or not is_main_process():
            raise
        try:
            if state.progress.updating:
                log.warning(
                    "No checkpoint is saved: iteration %d was interrupted during its update.",
                    state.progress.iteration + 1,
                )
            elif not (directory / files.checkpoint_name(state.progress.iteration)).exists():
                log.warning("The last whole iteration is saved: %s", write_checkpoint(directory, state))
        # Only warn about a checkpoint that cannot be written, so that the exception that ended training is raised
        except CheckpointError as error:
            log.warning("%s", error)
        raise


def verdict_line(metrics: Mapping[str, float]) -> str:
    """Return an evaluation's win rate, mean rewards and KL in one line."""
    rate, low, high = (100.0 * metrics[f"eval/win_rate{suffix}"] for suffix in ("", "_low", "_high"))
    return (
        f"Held-out prompts: win rate {rate:.0f} % against the reference policy (95 % interval {low:.0f} to {high:.0f} "
        f"%), reward {metrics['eval/reward']:z.3f} (reference {metrics['eval/reward_sft']:z.3f}), "
        f"KL {metrics['eval/kl']:z.2f} nats"
    )


def warn(learner: Learner, *, evaluates: bool) -> None:
    """Warn, in the main process, of settings that are unusual, slow on this device, or without effect in PPOTrainer."""
    if not is_main_process():
        return
    for line in learner.config.advice(parameters=learner.policy.num_parameters()):
        log.warning("%s", line)
    if slow_dtype := precision_warning(learner.config, learner.device):
        log.warning("%s", slow_dtype)
    without_effect = {"shutdown_grace_s": ", where a second Ctrl-C ends the wait"}
    if not evaluates:
        without_effect["eval_interval"] = " without evaluation_prompts"
    for name, why in without_effect.items():
        if name in learner.config.not_default():
            log.warning("ppo.%s: no effect in PPOTrainer%s", name, why)
