"""Halves how many responses a pass computes at a time when memory runs out, so that the run goes on.

The gradient of a minibatch does not depend on how the minibatch is cut into micro-batches, and a response, a score and
a log-probability do not depend on the responses that are computed with it. So the run goes on with the numbers of a run
that began with the smaller size, up to rounding.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ppo_rlhf.core.errors import TrainingError, in_one_line
from ppo_rlhf.core.memory_errors import is_out_of_memory
from ppo_rlhf.runtime.processes import from_all, own_rank, process_count, shards_models

log = logging.getLogger(__name__)

ROLLOUTS = "ppo.local_rollout_forward_batch_size"
"""The setting that says how many responses a process samples or scores at a time in training."""

KEYS = ROLLOUT_HALVINGS, UPDATE_HALVINGS = "rollout_halvings", "update_halvings"
"""The keys of the halvings of rollouts and of updates in a checkpoint, in metrics and in a summary."""

_LESS = "ppo.gradient_checkpointing=true, ppo.use_peft=true and a smaller ppo.response_length take less memory"


@dataclass
class Halving:
    """How often memory has run out in passes of one kind."""

    passes: str  # what the passes are part of
    setting: str = ""  # says how many responses a pass computes, as ppo.x; empty: no setting does
    like: str = ""  # what would begin with half as many, if more than the setting
    count: int = 0

    def of(self, rows: int) -> int:
        """Return how many responses a pass computes at a time, where the setting alone would give `rows`."""
        return max(1, rows >> self.count)

    def agree(self) -> None:
        """Halve in every process as often as in the process whose memory ran out most often; all processes call it."""
        self.count = max(from_all(self.count))

    @contextmanager
    def catching(self, rows: int, is_shared: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """If memory runs out in the block, with `rows` responses at a time, count a halving instead of raising.

        The caller runs the block again, with half of the responses. Other processes do not: `is_shared` returns whether
        the block has begun a collective, which a process cannot begin twice.

        Raises:
            TrainingError: Memory has run out with one response at a time, after the block has begun a collective, or in
                passes of shards (FSDP2), which are collectives.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = f"ran out of memory in {self.passes} with {rows} response{'s' * (rows > 1)} at a time"
            if process_count() > 1:
                ran_out = f"process {own_rank()} {ran_out}"
            why = in_one_line(error).rstrip(".")
            if rows == 1:
                raise TrainingError(f"{ran_out}: {why}. {_LESS}") from error
            if shards_models() or is_shared():
                raise TrainingError(
                    f"{ran_out}: {why}. The other processes wait for gradients or shards of this pass, so it cannot "
                    f"begin again: lower {self.setting or 'the number of responses at a time'}"
                ) from error
            self.count += 1
            like = f", as with {self.like}" if self.like else f" ({self.setting})" if self.setting else ""
            log.warning("%s%s; from here on half of them%s: %s", ran_out[0].upper(), ran_out[1:], like, why)
            # What the failed pass computed goes, and with it torch's cache: cuBLAS and cuDNN cannot allocate from it
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()


def of_rollouts() -> Halving:
    """Return the halving of the responses that a process samples or scores at a time."""
    return Halving("a rollout", ROLLOUTS)


def of_updates() -> Halving:
    """Return the halving of the micro-batches of updates."""
    return Halving(
        "an update",
        "ppo.per_device_train_batch_size",
        "half of ppo.per_device_train_batch_size and twice ppo.gradient_accumulation_steps",
    )


def of_evaluations() -> Halving:
    """Return the halving of an evaluation's responses."""
    return Halving("an evaluation", "evaluation.batch_size")
