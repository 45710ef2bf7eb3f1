"""The process's own heap, which keeps what was freed."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give blocks that were freed back to the system: the next phase asks for other sizes, which do not fit them.

    Before an update of 25 million parameters in bfloat16 that was 250 MiB of 1.4 GiB, in time too short to measure.
    Does nothing where the C library is not GNU's.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
