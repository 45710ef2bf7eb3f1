"""Work in a thread of its own: none is forgotten, and nobody has to wait for it."""

from __future__ import annotations

import threading

import pytest

from ppo_rlhf.hooks.background import Background

LONG = 30.0  # seconds, never reached


def test_what_comes_while_it_is_at_work_is_done_in_one_more_call():
    started, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        started.release()
        may_end.acquire()

    background = Background(work, "test")
    background.wake()
    started.acquire()
    for _ in range(3):
        background.wake()
    assert not background.wait(0.01)
    may_end.release(2)
    assert background.wait(LONG)
    assert started.acquire(blocking=False)
    assert not started.acquire(blocking=False)


def test_it_is_at_once_done_with_nothing_and_starts_anew_when_there_is_something():
    calls: list[str] = []
    background = Background(lambda: calls.append(threading.current_thread().name), "test")
    assert background.wait(0.0)
    for _ in range(2):
        background.wake()
        assert background.wait(LONG)
    assert calls == ["test", "test"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_in_the_work_does_not_keep_it_from_being_called_again():
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise ZeroDivisionError

    background = Background(work, "test")
    for _ in range(2):
        background.wake()
        background.wait(LONG)
    assert calls == [1, 1]


def test_where_the_system_has_no_thread_left_the_next_call_tries_again(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    background = Background(lambda: calls.append(1), "test")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        background.wake()
    assert not background.wait(0.0)
    background.wake()
    assert background.wait(LONG)
    assert calls == [1]
