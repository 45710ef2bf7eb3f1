"""Two `kedro run` at once in one project: both finish, and each logs the numbers that it logs when run alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.integration.outcomes import OF_THE_CLOCK, Run
from tests.integration.processes import kedro_run

SEEDS = (42, 1)
"""The first one is that of `chain`, which reports to TensorBoard, too."""
REPORTING = "data/test/08_reporting"
OF_ONE_RUN = re.compile(r"[0-9a-f]{32}|[\dT.-]{23}Z|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+ (second|minute)s?")
"""Ids of runs and plots, versions of models, how long it took."""


def told(project: Path, seed: int) -> dict[str, object]:
    """What MLflow has of the run with a seed, without clocks and names."""
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()], f"tags.seed = '{seed}'")
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    return {
        "id": run.info.run_id,
        "status": run.info.status,
        "metrics": {key: value for key, value in run.data.metrics.items() if not OF_THE_CLOCK.fullmatch(key)},
        "evaluation_summary.json": (artifacts / "evaluation/evaluation_summary.json").read_text(),
        "sample_pairs.csv": (artifacts / "evaluation/sample_pairs.csv").read_text(),
        "report.html": OF_ONE_RUN.sub("", (artifacts / "report/report.html").read_text()),
    }


@pytest.mark.slow
def test_two_runs_at_once_in_one_project_each_tell_what_they_tell_alone(
    chain: Run, make_project: Callable[[], Path], tmp_path: Path
) -> None:
    """Both runs begin each node outside the loop together, so that each run has written before the other reads."""
    alone, together = make_project(), make_project()

    def run(project: Path, seed: int, in_step: tuple[Path, str] | None) -> None:
        params = f"seed={seed},ppo.report_to=tensorboard"
        done = kedro_run(project, "--env", "test", "--params", params, in_step=in_step)
        assert done.returncode == 0, done.stdout + done.stderr

    with ThreadPoolExecutor() as threads:
        both = [threads.submit(run, together, seed, (tmp_path, str(seed))) for seed in SEEDS]
        for each in [*both, threads.submit(run, alone, SEEDS[1], None)]:
            each.result()
    for project, seed in zip((chain.project, alone), SEEDS, strict=True):
        expected, found = told(project, seed), told(together, seed)
        run_id = found.pop("id")
        assert found == {name: value for name, value in expected.items() if name != "id"}
        own = together / REPORTING / "runs" / str(run_id)
        assert {path.name for path in own.iterdir()}.isdisjoint(found)  # MLflow has the run's only copy
        assert (own / "token_samples.json").is_file()
