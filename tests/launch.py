"""A module started on several processes by torchrun, as the tests of several processes do it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
STOPPING_S = 60


def launch(
    module: str,
    *arguments: str,
    processes: int,
    folder: Path,
    timeout: float = 500,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m module` on so many processes to its end, with one thread each; none is left behind.

    torchrun starts each process in a session of its own, so it is asked to end them: killing it would leave them.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, *launcher, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            _, said = running.communicate(timeout=timeout)
        except BaseException:
            running.terminate()
            running.communicate(timeout=STOPPING_S)
            raise
    assert running.returncode == 0, said[-4000:]
