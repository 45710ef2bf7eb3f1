"""A hook that notes how long everything in a `kedro run` takes, or sends its process a signal at a moment it was told.

    {"note": "durations.json"}
    {"signal": "SIGKILL", "moment": "ppo.optimise_policy", "occurrence": 2, "after_s": 0.05}

A moment is a node, or `save:<dataset>` for the time in which a dataset is being saved, counted from its n-th occurrence
in this process.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl

SAVE = "save:"


class Watch:
    """A Kedro hook that sees every node and every save begin and end."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Take the order; see the module's text."""
        self._order = order
        self._begun: Counter[str] = Counter()
        self._started: dict[str, float] = {}
        self._durations: defaultdict[str, list[float]] = defaultdict(list)
        self._is_signalled = False

    @hook_impl
    def before_node_run(self, node: Any) -> None:
        self._begin(node.name)

    @hook_impl
    def after_node_run(self, node: Any) -> None:
        self._end(node.name)

    @hook_impl
    def before_dataset_saved(self, dataset_name: str, data: Any) -> None:
        if getattr(data, "due", True):  # a checkpoint that is not due is no save
            self._begin(SAVE + dataset_name)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        if getattr(data, "due", True):
            self._end(SAVE + dataset_name)

    @hook_impl
    def after_pipeline_run(self) -> None:
        if "note" in self._order:
            Path(self._order["note"]).write_text(json.dumps(self._durations))

    def _begin(self, moment: str) -> None:
        self._begun[moment] += 1
        self._started[moment] = time.perf_counter()
        if self._is_ordered(moment):
            timer = threading.Timer(self._order["after_s"], self._signal)
            timer.daemon = True
            timer.start()

    def _end(self, moment: str) -> None:
        self._durations[moment].append(time.perf_counter() - self._started[moment])
        if self._is_ordered(moment):
            self._signal()  # it was faster today than when it was timed

    def _is_ordered(self, moment: str) -> bool:
        return moment == self._order.get("moment") and self._begun[moment] == self._order["occurrence"]

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            os.kill(os.getpid(), signal.Signals[self._order["signal"]])
