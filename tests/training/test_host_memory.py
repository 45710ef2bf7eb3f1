"""What was freed goes back to the system before a process's first update, and every tenth one after it.

Large blocks do so at once while two threads share the heap.
"""

import itertools
from types import SimpleNamespace

from ppo_rlhf.training import host_memory


def test_freed_memory_is_given_back_at_first_and_regularly(monkeypatch):
    called: list[int] = []
    asked: list[int] = []
    library = SimpleNamespace(malloc_trim=lambda _: asked.append(len(called)), mallopt=lambda *_: None)
    monkeypatch.setattr(host_memory, "_gnu_library", lambda: library)
    monkeypatch.setattr(host_memory, "_calls", itertools.count())
    for call in range(25):
        host_memory.return_freed_memory()
        called.append(call)
    assert asked == [0, 10, 20]


def test_large_blocks_of_threads_that_share_the_heap_go_back_when_they_are_freed(monkeypatch):
    options: dict[int, int] = {}
    library = SimpleNamespace(malloc_trim=lambda _: None, mallopt=options.__setitem__)
    monkeypatch.setattr(host_memory, "_gnu_library", lambda: library)
    monkeypatch.setattr(host_memory, "_calls", itertools.count())
    monkeypatch.setattr(host_memory, "_heap_is_shared", False)
    monkeypatch.setattr(host_memory, "REGULARLY", 1)
    map_from = -3  # M_MMAP_THRESHOLD of malloc.h
    host_memory.return_freed_memory()
    assert options[map_from] == 32 * 2**20
    host_memory.share_one_heap()
    assert options[map_from] == 4 * 2**20
    host_memory.return_freed_memory()
    assert options[map_from] == 4 * 2**20


def test_nothing_is_done_without_the_library_that_can(monkeypatch):
    monkeypatch.setattr(host_memory, "_gnu_library", lambda: None)
    host_memory.return_freed_memory()
    host_memory.share_one_heap()
