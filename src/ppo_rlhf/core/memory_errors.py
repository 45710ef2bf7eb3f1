"""Recognises the errors that say that memory ran out, whatever library and device raised them."""

from __future__ import annotations

import re

import torch

from ppo_rlhf.core.errors import PPORLHFError

_SAID = re.compile(
    # CUDA, HIP, XPU and MPS, by torch's allocators or by the driver (`CUDA error: out of memory`)
    "out of memory"
    # On the CPU "can't allocate memory" on Linux and macOS, "not enough memory" on Windows
    "|DefaultCPUAllocator: "
    # cuBLAS, cuDNN and their like allocate beside torch: CUBLAS_STATUS_ALLOC_FAILED, …_DEVICE_ALLOCATION_FAILED
    "|_ALLOC(ATION)?_FAILED"
    "|std::bad_alloc"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, so that half the work may fit."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # This project's errors quote others: after "one response does not fit" half the work is no help
    return isinstance(error, RuntimeError) and not isinstance(error, PPORLHFError) and bool(_SAID.search(str(error)))
