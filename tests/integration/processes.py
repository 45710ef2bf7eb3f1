"""`kedro run` in a process of its own, as a person runs it, and one that gets a signal at a certain moment.

Both have one thread, so that sums are rounded alike in all of them.

    python -m tests.integration.processes SIGKILL ppo.optimise_policy 2 --env test

runs `kedro run --env test` and sends itself SIGKILL when the node begins for the second time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
Moment = tuple[str, str, int]


def kedro_run(project: Path, *arguments: str, interrupted: Moment | None = None) -> subprocess.CompletedProcess[str]:
    """Run `kedro run` with these arguments to its end; `interrupted` is a signal, a node, and which of its runs."""
    command = ["kedro", "run"] if interrupted is None else ["tests.integration.processes", *map(str, interrupted)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


class Interruption:
    """A Kedro hook that sends its process a signal when a node begins."""

    def __init__(self, name: str, node: str, occurrence: str) -> None:
        self._signum, self._node, self._left = signal.Signals[name], node, int(occurrence)

    @hook_impl
    def before_node_run(self, node: Any) -> None:
        self._left -= node.name == self._node
        if node.name == self._node and self._left == 0:
            os.kill(os.getpid(), self._signum)


if __name__ == "__main__":
    from kedro.framework.cli.cli import KedroCLI

    import ppo_rlhf.settings as settings

    settings.HOOKS = (*settings.HOOKS, Interruption(*sys.argv[1:4]))
    sys.argv = ["kedro", "run", *sys.argv[4:]]
    KedroCLI(Path.cwd())(sys.argv[1:], prog_name="kedro")
