"""A command that runs pipelines, up to its first node: the garbage collector waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from kedro.framework.hooks import hook_impl


class StartUpHook:
    """Holds the collector back from the start of a command until its first node runs.

    `imports.collector_paused` around each import alone leaves it the pauses in between, in which it goes through all
    that was imported so far. Runs that no command started, as in a notebook, are left alone.
    """

    def __init__(self) -> None:
        """Start without a command."""
        self._is_starting = False

    @contextmanager
    def of_command(self) -> Iterator[None]:
        """Let the collector wait for the first node, or for the end of the block if no node runs."""
        self._is_starting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            self.before_node_run()

    @hook_impl
    def before_node_run(self) -> None:
        """Let the collector go on, but not through what is there by now: that stays as long as the process."""
        if self._is_starting:
            self._is_starting = False
            gc.freeze()
            gc.enable()


start_up = StartUpHook()
"""Of this process, as the collector is."""
