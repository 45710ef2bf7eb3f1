"""`kedro run` in a process of its own, as a user runs it, and one that gets a signal at a certain moment.

Both have one thread, so that sums are rounded alike in all of them.

    python -m tests.integration.processes SIGKILL ppo.optimise_policy 2 --env test

runs `kedro run --env test` and sends itself SIGKILL when the node begins for the second time. With the name of a
dataset in place of the node's it does so when the dataset has been saved for the second time.

    python -m tests.integration.processes IN_STEP folder a --env test

begins each node outside the loop together with another such run, of another name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kedro.framework.hooks import hook_impl

from ppo_rlhf.runner import ITERATION_TAG

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
IN_STEP = "IN_STEP"
Moment = tuple[str, str, int]


def kedro_run(
    project: Path, *arguments: str, interrupted: Moment | None = None, in_step: tuple[Path, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `kedro run` with these arguments to its end.

    `interrupted` is a signal, a node or a dataset, and which of its runs or its saves; `in_step` an empty folder in
    which two runs meet, and the name of this one there.
    """
    command = ["kedro", "run"]
    if interrupted or in_step:
        command = ["tests.integration.processes", *map(str, interrupted or (IN_STEP, *in_step))]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # pytest-xdist sets COLUMNS in its workers
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        cwd=project,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


class Interruption:
    """A Kedro hook that sends its process a signal when a node begins, or when a dataset has been saved."""

    def __init__(self, name: str, moment: str, occurrence: str) -> None:
        self._signum, self._moment, self._left = signal.Signals[name], moment, int(occurrence)

    @hook_impl
    def before_node_run(self, node: Any) -> None:
        self._reach(node.name)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        self._reach(dataset_name)

    def _reach(self, name: str) -> None:
        self._left -= name == self._moment
        if name == self._moment and self._left == 0:
            os.kill(os.getpid(), self._signum)


class InStep:
    """A Kedro hook that begins each node outside the loop when another run does, before the node's inputs are read."""

    def __init__(self, _: str, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name

    @hook_impl
    def before_dataset_loaded(self, node: Any) -> None:
        end = time.monotonic() + TIMEOUT_S
        if ITERATION_TAG not in node.tags:
            (self._folder / f"{node.name} {self._name}").touch()
            while len(list(self._folder.glob(f"{node.name} *"))) < 2:
                assert time.monotonic() < end, f"the other run does not come to {node.name}"
                time.sleep(0.01)


if __name__ == "__main__":
    from kedro.framework.cli.cli import KedroCLI

    import ppo_rlhf.settings as settings

    hook = InStep if sys.argv[1] == IN_STEP else Interruption
    settings.HOOKS = (*settings.HOOKS, hook(*sys.argv[1:4]))
    sys.argv = ["kedro", "run", *sys.argv[4:]]
    KedroCLI(Path.cwd())(sys.argv[1:], prog_name="kedro")
