"""A killed run goes on as the same MLflow run; a finished one is done again, or longer: by the real command."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import LoggedModel, Run

from tests.integration.outcomes import Outcome, tracked
from tests.integration.processes import kedro_run

KILLED = json.dumps({"signal": "SIGKILL", "moment": "ppo.evaluate_iteration", "occurrence": 2, "after_s": 0.0})


@dataclass
class Story:
    """A project in which a run was killed in its second of three iterations, and then went on."""

    project: Path
    output: str

    def says(self, text: str) -> bool:
        """Whether the run logged this; lines of a log are wrapped, within paths too."""
        return "".join(text.split()) in "".join(self.output.split())

    @property
    def run(self) -> Run:
        _, [run] = tracked(self.project)
        return run

    def points(self) -> Counter[tuple[str, int]]:
        """Return how often each metric was logged at each step."""
        client, [run] = tracked(self.project)
        return Counter(
            (key, point.step) for key in run.data.metrics for point in client.get_metric_history(run.info.run_id, key)
        )

    def models(self) -> list[LoggedModel]:
        client, [run] = tracked(self.project)
        return list(client.search_logged_models([run.info.experiment_id]))

    def sampled(self) -> list[int]:
        table = json.loads((Path(self.run.info.artifact_uri.removeprefix("file://")) / "samples.json").read_text())
        return sorted(row[0] for row in table["data"])


def go_on(project: Path, *params: str) -> Story:
    finished = kedro_run(project, "--env", "test", "--params", ",".join(params))
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    return Story(project, output)


@pytest.fixture(scope="module")
def story(make_project: Callable[[], Path]) -> Story:
    project = make_project()
    killed = kedro_run(project, "--env", "test", watched=KILLED)
    assert killed.returncode == -9
    _, [run] = tracked(project)
    assert run.info.status == "RUNNING"  # nobody was left to end it
    return go_on(project, "resume=latest")


@pytest.fixture(scope="module")
def unbroken(make_project: Callable[[], Path]) -> Outcome:
    project = make_project()
    finished = kedro_run(project, "--env", "test")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return Outcome.of(project)


def test_a_killed_run_ends_like_one_that_was_never_killed(story: Story, unbroken: Outcome) -> None:
    assert Outcome.of(story.project) == unbroken


def test_no_step_is_logged_twice_not_even_of_a_clock(story: Story) -> None:
    points = story.points()
    assert set(points.values()) == {1}
    assert [step for key, step in sorted(points) if key == "time/rollout_s"] == [1, 2, 3]


def test_the_run_says_what_it_went_on_from(story: Story) -> None:
    tags = story.run.data.tags
    checkpoint = f"data/test/06_models/ppo_checkpoints/{story.run.info.run_id}/iteration_000002"
    assert tags["resume.1.checkpoint"] == checkpoint
    assert story.says(f"Going on with MLflow run {story.run.info.run_id} from {checkpoint}.")
    assert "bit_identical" not in tags


def test_every_iteration_is_sampled_once(story: Story) -> None:
    sampled = Counter(story.sampled())
    assert set(sampled) == {1, 2, 3}
    assert len(set(sampled.values())) == 1


def test_a_finished_run_that_is_named_is_exported_and_reported_again(story: Story, unbroken: Outcome) -> None:
    """The tests from here on go on with the same run, in this order."""
    before, points = story.models(), story.points()
    versions = {path.name for path in (story.project / "data/test/06_models/ppo_policy").iterdir()}
    again = go_on(story.project, f"resume={story.run.info.run_id}")
    assert Outcome.of(story.project) == unbroken
    assert again.points() == points
    assert [model.model_id for model in again.models()] == [model.model_id for model in before]
    assert len({path.name for path in (story.project / "data/test/06_models/ppo_policy").iterdir()} - versions) == 1
    assert again.says("No iteration is left to do: 3 of 3 are done.")


def test_with_more_episodes_a_finished_run_goes_on(story: Story) -> None:
    final = [model.model_id for model in story.models()]
    longer = go_on(story.project, f"resume={story.run.info.run_id}", "ppo.total_episodes=64")
    points = longer.points()
    assert set(points.values()) == {1}
    assert [step for key, step in sorted(points) if key == "objective/kl"] == [1, 2, 3, 4]
    assert [step for key, step in sorted(points) if key == "eval/win_rate"] == [2, 3, 4]
    tags = longer.run.data.tags
    assert tags["resume.3.total_episodes"] == "64"
    assert tags["bit_identical"] == "false"
    assert longer.run.info.status == "FINISHED"
    new = [model for model in longer.models() if model.model_id not in final]
    assert "ppo_policy" in {model.name for model in new}


def test_a_setting_that_must_not_change_is_refused(story: Story) -> None:
    run_id = story.run.info.run_id
    refused = kedro_run(story.project, "--env", "test", "--params", f"resume={run_id},ppo.kl_coef=0.3")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith(f"Error: resume={run_id}: MLflow run {run_id} goes on only as")
    assert "these differ: ppo.kl_coef (0.08 before, 0.3 now)" in refused.stderr
    assert story.run.info.status == "FINISHED"
    assert mlflow.active_run() is None
