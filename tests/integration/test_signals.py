"""SIGTERM, Ctrl-C twice, and a reader of the output that ends: the run ends in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run


@pytest.mark.slow
def test_sigterm_finishes_and_saves_the_iteration(make_project: Callable[[], Path]) -> None:
    """A run goes on from such a checkpoint as from that of a killed run (test_resume.py)."""
    project = make_project()
    stopped = kedro_run(project, "--env", "test", interrupted=("SIGTERM", "ppo.score_responses", 2))
    run = Run(project, stopped.stdout)
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    assert run.says("SIGTERM: finishing iteration 2 and saving it, then stopping; a second signal stops at once.")
    assert "The run was stopped by SIGTERM." in stopped.stderr
    assert run.tracked.info.status == "KILLED"
    assert run.tracked.data.tags["last_checkpoint"].endswith("iteration_000002")
    assert (run.folder / "iteration_000002/manifest.json").is_file()
