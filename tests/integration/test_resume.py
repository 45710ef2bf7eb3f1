"""kill -9, then the same command with resume=latest: as if nothing had happened. A finished run can go on, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run

pytestmark = pytest.mark.slow


def go_on(project: Path, *params: str) -> Run:
    finished = kedro_run(project, "--env", "test", "--params", ",".join(params))
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    return Run(project, output)


@pytest.fixture(scope="module")
def story(make_project: Callable[[], Path]) -> Run:
    """A run that was killed in its second of three iterations, before its evaluation, and resumed."""
    project = make_project()
    killed = kedro_run(project, "--env", "test", interrupted=("SIGKILL", "ppo.evaluate_iteration", 2))
    assert killed.returncode == -9, killed.stdout + killed.stderr
    assert Run(project, "").tracked.info.status == "RUNNING"  # nobody was left to end it
    return go_on(project, "resume=latest")


def test_a_killed_run_ends_like_one_that_was_never_killed(story: Run, chain: Run) -> None:
    assert story.outcome() == chain.outcome()
    assert set(story.points().values()) == {1}  # no step is logged twice, not even of a clock
    assert story.points().keys() == chain.points().keys()


def test_it_skips_the_stages_that_it_had_finished(story: Run) -> None:
    assert story.says("Skipping 6 nodes: this MLflow run has written their outputs.")
    assert len(list((story.project / "data/test/06_models/sft_policy").iterdir())) == 1


def test_it_says_what_it_went_on_from(story: Run) -> None:
    checkpoint = f"data/test/06_models/ppo_checkpoints/{story.tracked.info.run_id}/iteration_000002"
    assert story.tracked.data.tags["resume.checkpoint"] == checkpoint
    assert story.says(f"Resuming MLflow run {story.tracked.info.run_id} from {checkpoint}.")


def test_the_report_of_a_resumed_run_shows_the_same_tokens_with_the_same_numbers(story: Run, chain: Run) -> None:
    shown, expected = (
        (run.project / "data/test/08_reporting/token_samples.json").read_bytes() for run in (story, chain)
    )
    assert shown == expected
    assert "Token by token" in (story.project / "data/test/08_reporting/report.html").read_text()


def test_a_finished_run_that_is_named_is_exported_and_reported_again_and_with_more_episodes_it_goes_on(
    story: Run, chain: Run
) -> None:
    models, points = [model.model_id for model in story.logged_models()], story.points()
    versions = len(list((story.project / "data/test/06_models/ppo_policy").iterdir()))
    again = go_on(story.project, f"resume={story.tracked.info.run_id}")
    assert again.says("Training is already complete (3 of 3 iterations).")
    assert again.outcome() == chain.outcome()
    assert again.points() == points
    assert [model.model_id for model in again.logged_models()] == models
    assert len(list((story.project / "data/test/06_models/ppo_policy").iterdir())) == versions + 1

    longer = go_on(story.project, f"resume={story.tracked.info.run_id}", "ppo.total_episodes=64")
    points = longer.points()
    assert set(points.values()) == {1}
    assert [step for key, step in sorted(points) if key == "objective/kl"] == [1, 2, 3, 4]
    assert [step for key, step in sorted(points) if key == "eval/win_rate"] == [2, 3, 4]
    assert longer.tracked.info.status == "FINISHED"
    assert "ppo_policy" in {model.name for model in longer.logged_models() if model.model_id not in models}
