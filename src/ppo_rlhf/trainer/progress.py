"""What a script sees of PPOTrainer's training, and what an exception leaves of it on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from ppo_rlhf.checkpoints.files import checkpoint_name
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.ppo.precision import precision_warning
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import is_main_process

log = logging.getLogger(__name__)

_SHOWN = {
    "objective/scores": "score {:.3f}",
    "objective/kl": "KL {:.2f} nats a response",
    "objective/entropy": "entropy {:.2f} nats a token",
    "response/length": "length {:.1f} tokens",
    "throughput/episodes_per_s": "{:.1f} episodes/s",
}


def say(line: str) -> None:
    """Log a line in the main process; print it if logging is not set up, as transformers' Trainer does."""
    if not is_main_process():
        return
    if log.hasHandlers():
        log.info("%s", line)
    else:
        tqdm.write(line)


@contextmanager
def watched(state: TrainingState, directory: Path | None) -> Iterator[tqdm]:
    """Yield a bar over the iterations, shown if logging is not set up; save the last whole iteration on an error.

    Only the main process saves: the others may never get here.
    """
    hidden = True if log.hasHandlers() or not is_main_process() else None
    try:
        with tqdm(desc="PPO", initial=state.iteration, total=state.total_iterations, disable=hidden) as bar:
            yield bar
    except BaseException:
        if directory is None or not state.iteration or not is_main_process():
            raise
        try:
            if state.updating:
                log.warning("Nothing is saved: iteration %d was half-way through its update.", state.iteration + 1)
            elif not (directory / checkpoint_name(state.iteration)).exists():
                log.warning("The last whole iteration is saved: %s", write_checkpoint(directory, state))
        except CheckpointError as error:  # the exception that ends the training counts more
            log.warning("%s", error)
        raise


def in_one_line(state: TrainingState, metrics: Mapping[str, float]) -> str:
    """Return an iteration's metrics at a glance."""
    shown = [text.format(metrics[key]) for key, text in _SHOWN.items() if key in metrics]
    return ", ".join([f"Iteration {state.iteration}/{state.total_iterations}", *shown])


def verdict_line(metrics: Mapping[str, float]) -> str:
    """Return an evaluation's metrics at a glance."""
    rate, low, high = (100.0 * metrics[f"eval/win_rate{end}"] for end in ("", "_low", "_high"))
    return (
        f"Held-out prompts: win rate {rate:.0f} % against the reference policy (95 % interval {low:.0f} to {high:.0f} "
        f"%), reward {metrics['eval/reward']:.3f} (reference {metrics['eval/reward_sft']:.3f}), "
        f"KL {metrics['eval/kl']:.2f} nats"
    )


def warn(state: TrainingState, *, evaluates: bool) -> None:
    """Log, in the main process, settings that are unusual, slow on this device, or of no effect in PPOTrainer."""
    if not is_main_process():
        return
    config, slow = state.config, precision_warning(state.config, state.device)
    for line in [*config.advice(parameters=state.policy.num_parameters()), *([slow] if slow else [])]:
        log.warning("%s", line)
    idle = {} if evaluates else {"eval_interval": " without evaluation_prompts"}
    for name, why in {**idle, "shutdown_grace_s": ", which handles no signals"}.items():
        if name in config.not_default():
            log.warning("ppo.%s: no effect in PPOTrainer%s", name, why)
