"""The process's own heap: what was freed stays for use by the next phases, and goes back to the system now and then."""

from __future__ import annotations

import ctypes
import itertools
import sys

REGULARLY = 10
"""Updates from one time that freed memory is given back to the next."""

_calls = itertools.count()  # of the process, as its heap is
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_NEVER, _LARGE = 2**31 - 1, 32 * 2**20  # the largest that mallopt takes for each
_LARGE_FOR_TWO = 4 * 2**20


def return_freed_memory(*, two_large_models: bool = False) -> None:
    """Before an update, give blocks that were freed back to the system: it asks for other sizes, which do not fit them.

    The first time in a process, whose models were loaded and whose rollouts were made before: of 25 million parameters
    in bfloat16 that was 250 MiB of 1.4 GiB. From then on the C library keeps what is freed, since taking it again,
    page by page, was 3 to 5 % of a small model's update: the end of its heap it would give up after every step,
    the rest this call would. Phases that alternate find their own blocks again; lengths drift, so every `REGULARLY`
    calls it is done anew. Does nothing where the C library is not GNU's.

    Large blocks of two models that compute at the same time leave holes in the heap that they share. With
    `two_large_models` each block from 4 MiB on goes back when it is freed: of 25 million parameters in bfloat16 that
    saves 45 MiB of 1.1 GiB, and costs 2 % of the processor's time. A model that is alone finds its blocks again, and
    would pay 5 to 8 %; small ones save little, and pay 15 % from the length on at which their blocks are that large.
    """
    library = _gnu_library()
    if library is None:
        return
    if next(_calls) % REGULARLY == 0:
        library.malloc_trim(0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_M_MMAP_THRESHOLD, _LARGE_FOR_TWO if two_large_models else _LARGE)


def share_one_heap() -> None:
    """Let threads that are started from now on share the heap that there is.

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
