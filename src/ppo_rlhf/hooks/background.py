"""A function in a thread of its own, so that a run does not wait for what that function waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


class Background:
    """Calls one function each time there is something for it to do, once at a time.

    A process that ends does not wait for it.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        """Take the function, which has to say itself what goes wrong, and a name for its thread."""
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._is_due = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have the function called, once more if it is at work now; return at once."""
        with self._lock:
            self._is_due = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                with suppress(RuntimeError):  # the system has no thread left: the next call tries again
                    thread.start()
                    self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait until it has nothing to do, no longer than this; return whether that is so."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        with self._lock:
            return self._thread is None and not self._is_due

    def _run(self) -> None:
        try:
            while self._has_work():
                self._work()
        except BaseException:  # a mistake of ours, which `threading.excepthook` prints; the next call starts anew
            with self._lock:
                self._thread = None
            raise

    def _has_work(self) -> bool:
        with self._lock:
            has_work, self._is_due = self._is_due, False
            if not has_work:
                self._thread = None
        return has_work
