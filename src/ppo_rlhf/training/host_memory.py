"""The process's own heap: what was freed goes back to the system before an update, and stays for use within it."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_NEVER, _LARGE = 2**31 - 1, 32 * 2**20  # the largest that mallopt takes for each


def return_freed_memory() -> None:
    """Give blocks that were freed back to the system, once: the next phase asks for other sizes, which do not fit them.

    Before an update of 25 million parameters in bfloat16 that was 250 MiB of 1.4 GiB, in time too short to measure.
    From then on the C library keeps what is freed, until the next call. It would give up the end of its heap after
    every step, and taking it again, page by page, was 4 % of an iteration's processor time.
    Does nothing where the C library is not GNU's.
    """
    library = _gnu_library()
    if library is not None:
        library.malloc_trim(0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def use_one_heap() -> None:
    """Let threads that are started from now on share the heaps that there are.

    A thread's own is made of pieces of 64 MiB: it wastes what a large block leaves of one, and gives up whole pieces.
    """
    library = _gnu_library()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, 1)


def _gnu_library() -> ctypes.CDLL | None:
    """Return the C library if it is GNU's."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
