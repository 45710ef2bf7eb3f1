"""`kedro push`: the right model of the right run goes to the hub, and nothing on a dry run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from mlflow import MlflowClient

from ppo_rlhf.models.trained_model import TrainedModel
from tests.hub_stand_in import running_hub
from tests.tiny_models import tiny_model, word_tokenizer

Kedro = Callable[..., Result]
CARD = "---\nlibrary_name: transformers\n---\n\n# A model\n"


def recorded(project: Path, name: str, version: str, status: str = "FINISHED", started: int = 1000) -> str:
    """Record a run with its model, as the tracking hook does."""
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    found = client.get_experiment_by_name("ppo_rlhf")
    place = found.experiment_id if found else client.create_experiment("ppo_rlhf")
    folder = project / "data" / "06_models" / name / version
    TrainedModel(tiny_model(), word_tokenizer(), card=f"{CARD}{version}").save(folder)
    run = client.create_run(
        place, start_time=started, tags={f"written.{name}.{version}": str(folder.relative_to(project))}
    )
    client.set_terminated(run.info.run_id, status)
    return str(run.info.run_id)


def test_the_newest_finished_runs_policy_is_pushed_or_the_one_that_is_named(
    kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    first = recorded(toy_project, "ppo_policy", "v1", started=1000)
    second = recorded(toy_project, "ppo_policy", "v2", started=2000)
    recorded(toy_project, "ppo_policy", "v3", status="FAILED", started=3000)
    third = recorded(toy_project, "reward_model", "v4", started=4000)
    with running_hub(monkeypatch) as hub:
        result = kedro(toy_project, "push", "me/policy", "--dry-run")
        assert result.exit_code == 0, result.output
        assert f"ppo_policy of MLflow run {second}" in result.output
        assert "Would be sent to me/policy, private if it is new:\n  README.md  0.0 MB\n  config.json" in result.output
        assert not hub.repositories
        for options in ([], ["--run", first], ["--reward-model", "--public", "--license", "mit"]):
            repository = "me/reward" if options[:1] == ["--reward-model"] else "me/policy"
            result = kedro(toy_project, "push", repository, *options)
            assert result.exit_code == 0, result.output
        policy, reward = hub.repositories["me/policy"], hub.repositories["me/reward"]
        assert policy.messages == [f"ppo_policy of MLflow run {second}", f"ppo_policy of MLflow run {first}"]
        assert [files["README.md"][-2:] for files in policy.commits] == [b"v2", b"v1"]
        assert (policy.is_private, reward.is_private) == (True, False)
        assert reward.messages == [f"reward_model of MLflow run {third}"]
        assert b"license: mit" in reward.files["README.md"]


@pytest.mark.slow
def test_what_cannot_be_pushed_is_said_in_one_line(kedro: Kedro, toy_project: Path, monkeypatch: pytest.MonkeyPatch):
    (toy_project / "mlflow.db").touch()
    run = recorded(toy_project, "reward_model", "v1")
    with running_hub(monkeypatch, token=None):
        for arguments, line in {
            ("me/policy",): "push: .*`hf auth login`.* HF_TOKEN",
            (
                "me/policy",
                "--dry-run",
            ): "no finished run .* ppo_rlhf .*ppo_policy: `kedro run`",
            ("my policy", "--dry-run", "--run", run): "push: my policy ",
            ("me/policy", "--dry-run", "--run", run): f"MLflow run {run} .*ppo_policy: `kedro run`",
        }.items():
            result = kedro(toy_project, "push", *arguments)
            assert result.exit_code == 1, result.output
            assert "Traceback" not in result.output
            (shown,) = [each for each in result.stderr.splitlines() if each.startswith("Error:")]
            assert re.match(f"Error: {line}", shown)
