"""Errors that say that memory ran out: those that this machine raises, and others' words for it."""

import pytest
import torch

from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.core.memory_errors import is_out_of_memory
from tests.memory_errors import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_each_librarys_error_says_that_memory_ran_out(kind):
    assert is_out_of_memory(KINDS[kind])


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 60), lambda: bytearray(1 << 62)], ids=["torch", "Python"]
)
def test_an_allocation_beyond_the_machines_memory_says_so(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate()
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if the input is not contiguous."),
        ValueError("out of memory."),
        OSError("out of memory"),
        # Half of one response is none
        TrainingError(
            "ran out of memory in a rollout with 1 response at a time: CUDA out of memory. Tried to allocate"
        ),
    ],
    ids=str,
)
def test_other_errors_do_not(error):
    assert not is_out_of_memory(error)
