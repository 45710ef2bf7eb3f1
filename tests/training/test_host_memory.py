"""What was freed goes back to the system before a process's first update, and every tenth one after it.

Large blocks do so at once while two large models compute.
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


def test_large_blocks_go_back_when_they_are_freed_while_two_large_models_compute_at_once(monkeypatch):
    options: dict[int, int] = {}
    library = SimpleNamespace(malloc_trim=lambda _: None, mallopt=options.__setitem__)
    monkeypatch.setattr(host_memory, "_gnu_library", lambda: library)
    monkeypatch.setattr(host_memory, "_calls", itertools.count())
    map_from = -3  # M_MMAP_THRESHOLD of malloc.h
    host_memory.share_one_heap()
    assert map_from not in options
    for two, expected in ((False, 32), (True, 4), (False, 32)):
        host_memory.return_freed_memory(two_large_models=two)
        assert options[map_from] == expected * 2**20


def test_nothing_is_done_without_the_library_that_can(monkeypatch):
    monkeypatch.setattr(host_memory, "_gnu_library", lambda: None)
    host_memory.return_freed_memory()
    host_memory.share_one_heap()
