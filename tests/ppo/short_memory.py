"""Memory that runs out: passes of rollouts and updates raise an error if they compute too many responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ppo_rlhf.passes import engines
from ppo_rlhf.ppo import forward_passes
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.rewards import scorers
from tests.memory_errors import KINDS

ERROR = KINDS["CUDA"]
PHASES = (
    *("sampling", "reference", "scoring", "policy's passes", "critic's passes"),
    *("policy's update", "policy's backward pass", "policy's gradient", "critic's update"),
)

FIRST_BACKWARD = "first backward pass"
"""The phase of a run's first backward pass, whatever its responses are."""


class ShortMemory:
    """Lets memory run out in one phase, by `error`, if a pass there has more than `most` responses."""

    def __init__(self, patch: pytest.MonkeyPatch, phase: str, most: int, error: Exception = ERROR) -> None:
        assert phase in (*PHASES, FIRST_BACKWARD)
        self.most, self.error, self.tried = most, error, []  # `tried`: responses of each pass of the phase
        if phase == "sampling":
            self._watch(patch, engines, "decode_packed", lambda model, prompt_ids, *_: len(prompt_ids))
        elif phase == "reference":
            self._watch(patch, forward_passes, "batch_logprobs", lambda model, batch, *_: batch.shape[0])
        elif phase == "scoring":
            self._watch(patch, scorers, "sequence_scores", lambda model, sequences, _: len(sequences))
        elif phase == "policy's gradient":
            # Memory runs out after gradients were added, which must not be added again
            self._watch(patch, Learner, "_backward", lambda learner, loss: self.rows, after=True)
            self._note_rows(patch)
        elif phase == "policy's backward pass":
            self._watch(patch, Learner, "_backward", lambda learner, loss: self.rows)
            self._note_rows(patch)
        elif phase == FIRST_BACKWARD:
            self._watch(patch, Learner, "_backward", lambda learner, loss: 1 if self.tried else most + 1)
        else:
            forward = PolicyForward if phase.startswith("policy") else CriticForward
            self._watch(patch, forward, "forward", self._rows_in(training=phase.endswith("update")))

    def _rows_in(self, *, training: bool) -> Any:
        return lambda forward, batch, **_: batch.shape[0] if torch.is_grad_enabled() == training else 0

    def _note_rows(self, patch: pytest.MonkeyPatch) -> None:
        original = Learner.add_gradients

        def noting(learner, micro_batch, *how):
            self.rows = micro_batch.mask.shape[0]
            return original(learner, micro_batch, *how)

        patch.setattr(Learner, "add_gradients", noting)

    def _watch(self, patch: pytest.MonkeyPatch, place: Any, name: str, rows_of: Any, *, after: bool = False) -> None:
        original = getattr(place, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            rows = rows_of(*args, **kwargs)
            if rows:
                self.tried.append(rows)
            if after:
                original(*args, **kwargs)
            if rows > self.most:
                raise self.error
            return None if after else original(*args, **kwargs)

        patch.setattr(place, name, watched)
