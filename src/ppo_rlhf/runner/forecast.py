"""How long it takes until the state of the iteration that is running is saved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

RECENT = 3
"""Times of each node that are looked back on: a slow first iteration (kernels, caches) is soon forgotten."""


class Forecast:
    """An estimate by the longest of the last few times of each node and of the save.

    Saves that are due are rare, so a run may have to judge before it has timed one. A save is then taken to need as
    long as the node that makes the state ever did. Were that too little and the process ended in the middle of the
    save, the checkpoint before it would still be whole.

    A signal handler reads this between any two bytecodes, so what it reads changes by single assignments.
    """

    def __init__(self, nodes: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Take the names of an iteration's nodes in their order, up to the one that makes the state and saves it."""
        self._nodes = tuple(nodes)
        self._clock = clock
        self._times: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in self._nodes}
        self._saves: deque[float] = deque(maxlen=RECENT)
        self._longest_last_node = 0.0
        self._running = (self._nodes[0], clock())
        self._saving_since: float | None = None
        self._saved_s = 0.0

    @contextmanager
    def timing(self, node: str) -> Iterator[None]:
        """Time one of the nodes with all that Kedro and hooks do around it, less the save if it was due."""
        started, self._saved_s = self._clock(), 0.0
        self._running = (node, started)
        yield
        seconds = self._clock() - started
        self._times[node].append(seconds - self._saved_s)
        if node == self._nodes[-1]:
            self._longest_last_node = max(self._longest_last_node, seconds)

    def save_starts(self) -> None:
        """Note that the running node has come to a save that is due."""
        self._saving_since = self._clock()

    def save_ends(self) -> None:
        """Note that the save is done."""
        if self._saving_since is not None:
            self._saved_s = self._clock() - self._saving_since
            self._saves.append(self._saved_s)
            self._saving_since = None

    def save_s(self) -> float:
        """Return how long a save takes."""
        if self._saves:
            return max(self._saves)
        node, started = self._running
        return max(self._longest_last_node, self._clock() - started if node == self._nodes[-1] else 0.0)

    def until_saved_s(self) -> float | None:
        """Return how long it takes from now until the state is saved, None before the first iteration is complete.

        A node that has taken longer than expected is expected to need as long again: it may hang.
        """
        if self._saving_since is not None:
            return _rest(self.save_s(), self._clock() - self._saving_since)
        expected = {name: max(times) for name, times in self._times.items() if times}
        if len(expected) < len(self._nodes):
            return None
        node, started = self._running
        behind = self._nodes[self._nodes.index(node) + 1 :]
        rest = _rest(expected[node], self._clock() - started)
        return rest + sum(expected[name] for name in behind) + self.save_s()


def _rest(expected: float, elapsed: float) -> float:
    return expected - elapsed if elapsed <= expected else elapsed
