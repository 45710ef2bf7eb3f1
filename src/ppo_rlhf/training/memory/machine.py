"""How much memory is there for a run, where it computes and in the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Free memory.

    Attributes:
        device: Bytes free where the run computes: on the CUDA device, or in the host's memory if it is the CPU.
        host: Bytes free in the host's memory.
    """

    device: int
    host: int


def available_memory(device: torch.device) -> Machine:
    """Return what is free now on a device and on the host, a container's limit included."""
    host = _free_on_host()
    return Machine(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host, host)


def _free_on_host(cgroup: Path = CGROUP) -> int:
    """Return the bytes that the system says can be had without swapping, or what a container's limit leaves of them."""
    free = int(psutil.virtual_memory().available)
    limit, used = (_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return free
    return min(free, max(0, limit - used))


def _number(file: Path) -> int | None:
    """Return what a file of a control group says; None where there is no such file, or no limit (`max`)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
