"""A run that is stopped or killed at any moment, and resumed, has the bits of an uninterrupted run, in float32."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_rlhf.checkpoints import store
from ppo_rlhf.checkpoints.files import newest_whole_checkpoint
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.signals import RunInterruptedError
from tests.checkpoints.support import assert_same, everything
from tests.tiny_models import save, tiny_model
from tests.trainer.test_trainer import FUNCTION, config, pipeline_run, repeatable

ITERATIONS, HIT = 5, 4
"""The checkpoints of 5 iterations are due after 2, 4 and 5; signals come in iteration 4, or while it is saved."""
STEPS = 4  # optimiser steps of an iteration: 2 epochs of 2 minibatches, each of one micro-batch


def run(sft: str, **options: Any) -> TrainingState:
    settings = config(save_interval=2, total_episodes=ITERATIONS * config().batch_size, kl_controller="adaptive")
    assert settings.dtype in ("auto", "float32")
    state: TrainingState = pipeline_run(sft, settings, FUNCTION, **options)["checkpoint"].load()
    return state


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("sft"), tiny_model())


@pytest.fixture(scope="module")
def whole(sft: str) -> TrainingState:
    return run(sft)


def striking(monkeypatch: pytest.MonkeyPatch, moment: str, strike: Callable[[], None]) -> None:
    """Let `strike` be called once, at a moment of iteration `HIT`."""

    def after(owner: Any, name: str, call: int) -> None:
        function, calls = getattr(owner, name), []

        def wrapped(*given: Any, **options: Any) -> Any:
            result = function(*given, **options)
            calls.append(1)
            if len(calls) == call:
                strike()
            return result

        monkeypatch.setattr(owner, name, wrapped)

    if moment in ("sampling", "scoring"):
        after(loop, "sample_batch" if moment == "sampling" else "score_responses", HIT)
    elif moment == "checkpoint":
        after(store, "write_models", HIT // 2)
    else:
        after(Learner, "add_gradients", (HIT - 1) * STEPS + (1 if moment == "first micro-batch" else STEPS))


SAVED = {"sampling": 3, "scoring": 3, "first micro-batch": 3, "last micro-batch": 4, "checkpoint": 4}
"""The last iteration that is saved after SIGTERM at each moment; after SIGKILL it is 2."""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("moment", SAVED)
def test_a_run_that_was_ended_at_any_moment_resumes_to_the_bits_of_one_that_was_not(
    sft: str, whole: TrainingState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, name: str
):
    with monkeypatch.context() as patched:
        if name == "SIGTERM":
            striking(patched, moment, lambda: signal.raise_signal(signal.SIGTERM))
            with pytest.raises(RunInterruptedError, match="SIGTERM"):
                run(sft, checkpoints=tmp_path)
        elif (child := os.fork()) == 0:
            striking(patched, moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
            try:
                run(sft, checkpoints=tmp_path)
            finally:
                os._exit(99)
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    checkpoint = newest_whole_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint.name == f"iteration_{SAVED[moment] if name == 'SIGTERM' else 2:06d}"
    resumed = run(sft, resume=checkpoint)
    assert repeatable(resumed.progress.history) == repeatable(whole.progress.history)
    assert resumed.extra_state() == whole.extra_state()
    assert_same(everything(resumed), everything(whole))
    assert {tensor.dtype for tensor in everything(resumed).values()} == {torch.float32}
