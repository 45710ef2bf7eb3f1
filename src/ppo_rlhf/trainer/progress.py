"""What a script sees of PPOTrainer's training, and what an exception leaves of it on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from ppo_rlhf.checkpoints.files import checkpoint_name
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import is_main_process

log = logging.getLogger(__name__)


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
