"""A critic is pretrained, stored, and started from in a later run, as a user does it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from kedro.framework.project import configure_project
from kedro.framework.session import KedroSession
from mlflow import MlflowClient
from mlflow.entities import Run as TrackedRun
from safetensors.torch import load_file

from ppo_rlhf.models.loading import PretrainedHandle
from tests.integration.outcomes import Run

pytestmark = pytest.mark.slow

Kedro = Callable[..., Result]
PRETRAINED = "ppo.value_model=pretrained"


@pytest.fixture(scope="module")
def project(chain: Run, make_project: Callable[[], Path], kedro_logging: None, kedro: Kedro) -> Path:
    """A project with a policy and a reward model, in which a critic was pretrained."""
    project = make_project()
    for name in ("sft_policy", "reward_model"):
        shutil.copytree(chain.model(name), project / "data/test/06_models" / name / "version")
    refused = kedro(project, "run", "--env", "test", "--pipelines", "ppo", "--params", PRETRAINED)
    assert refused.exit_code != 0
    assert Run(project, refused.output).says("kedro run --env test --pipelines critic_pretraining")
    run(kedro, project, "critic_pretraining")
    return project


def run(kedro: Kedro, project: Path, pipelines: str, *params: str) -> None:
    given = ["--params", ",".join(params)] if params else []
    result = kedro(project, "run", "--env", "test", "--pipelines", pipelines, *given)
    assert result.exit_code == 0, result.output


def tracked(project: Path, pipeline: str) -> TrackedRun:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    return client.search_runs(experiments, f"tags.pipeline = '{pipeline}'")[0]  # the newest


def stored(project: Path) -> Path:
    [config] = (project / "data/test/06_models/pretrained_critic").glob("*/config.json")
    return config.parent


def test_a_run_starts_from_it_bit_for_bit(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    configure_project("ppo_rlhf")
    with KedroSession.create(project, env="test", runtime_params={"ppo": {"value_model": "pretrained"}}) as session:
        outputs = session.run(pipeline_names=["ppo"], to_nodes=["ppo.initialise_training_state"])
    critic = outputs["training_state"].load().learner.critic
    found = {f"model.{name}": tensor for name, tensor in critic.backbone.state_dict().items()}
    for head in ("score", "v_head.summary"):
        found |= {f"{head}.{name}": tensor for name, tensor in critic.value_head.state_dict().items()}
    wanted = load_file(stored(project) / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_run_says_which_critic_it_started_from_and_goes_on(project: Path, kedro: Kedro) -> None:
    run(kedro, project, "ppo", PRETRAINED, "ppo.total_episodes=16")
    found, critic = tracked(project, "ppo"), PretrainedHandle(str(stored(project)))
    assert found.data.tags["data.pretrained_critic.path"] == critic.source
    assert found.data.tags["data.pretrained_critic.fingerprint"] == critic.fingerprint()
    resume = f"resume={found.info.run_id}"
    run(kedro, project, "ppo", PRETRAINED, "ppo.total_episodes=32", resume)
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    history = client.get_metric_history(found.info.run_id, "val/explained_variance")
    assert sorted(point.step for point in history) == [1, 2]
