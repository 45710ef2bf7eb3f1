"""Two runs at once in one project directory give what each gives alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.interruptions import ARGUMENTS, Reference
from tests.integration.outcomes import Outcome, tracked
from tests.integration.processes import kedro_run

OTHER_SEED = 7


def with_seed(seed: int) -> tuple[str, ...]:
    return (*ARGUMENTS[:-1], f"{ARGUMENTS[-1]},seed={seed}")


def summaries(project: Path) -> dict[str, dict[str, object]]:
    """Return the evaluation that each run logged as an artifact, by seed."""
    client, runs = tracked(project)
    return {
        run.data.tags["seed"]: json.loads(
            Path(client.download_artifacts(run.info.run_id, "evaluation/evaluation_summary.json")).read_text()
        )
        for run in runs
    }


def test_two_runs_at_once_give_what_each_gives_alone(make_project: Callable[[], Path], reference: Reference) -> None:
    alone, together = make_project(), make_project()
    finished = kedro_run(alone, *with_seed(OTHER_SEED))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda seed: kedro_run(together, *with_seed(seed)), (42, OTHER_SEED)))
    for one in both:
        assert one.returncode == 0, one.stdout + one.stderr
    assert "WARNING" not in "".join(line for one in both for line in one.stdout.splitlines() if "MLflow" in line)

    ours = Outcome.of(together, seed=42)
    checkpoint = {name: value for name, value in reference.outcome.weights.items() if name.startswith("checkpoint/")}
    assert ours.differences(Outcome(reference.outcome.status, reference.outcome.metrics, checkpoint)) == []
    assert Outcome.of(together, seed=OTHER_SEED).differences(Outcome.of(alone, seed=OTHER_SEED)) == []
    assert summaries(together)[str(OTHER_SEED)] == summaries(alone)[str(OTHER_SEED)]
    assert summaries(together)["42"] != summaries(together)[str(OTHER_SEED)]
