"""The start of a command that runs pipelines: Python's garbage collector waits until it is over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from kedro.framework.hooks import hook_impl
from kedro.framework.project import settings


class StartUpHook:
    """Holds the collector back from the start of a command until its pipeline runs.

    Pausing it for each large import alone (`imports.collector_paused`) is not enough: between two of them it goes
    through all that was imported so far. Runs that no command started, as in a notebook, are left alone.
    """

    def __init__(self) -> None:
        """Start without a command."""
        self._is_starting = False
        self._has_frozen = False

    @contextmanager
    def of_command(self) -> Iterator[None]:
        """Let the collector wait within the block until the pipeline runs.

        Nothing happens in a project whose settings leave this hook out: nobody would let the collector go on.
        """
        self._is_starting = gc.isenabled() and self in settings.HOOKS
        if self._is_starting:
            gc.disable()
        try:
            yield
        finally:
            self._let_go_on()

    @hook_impl(trylast=True)
    def before_pipeline_run(self) -> None:
        """Let the collector go on, in the first run of a process without what is there by now.

        That is modules, 0.7 million objects, which it would soon go through several times, half a second in all. The
        sixteenth of them that is garbage stays with the rest. Not so in later runs: what is there then held models.
        """
        if self._is_starting and not self._has_frozen:
            self._has_frozen = True
            gc.freeze()
        self._let_go_on()

    def _let_go_on(self) -> None:
        if self._is_starting:
            self._is_starting = False
            gc.enable()


start_up_hook = StartUpHook()
"""One for the whole process, since the collector is."""
