"""The models' options through the whole pipeline: what is on disk, and in MLflow, after a run with all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.hooks.model_log import log_policy
from tests.integration.processes import kedro_run

pytestmark = pytest.mark.slow

SETTINGS = {
    "use_peft": "true",
    "lora_r": "4",
    "value_model": "shared",
    "export_value_head": "true",
    "export_critic": "true",
    "ema_decay": "0.9",
    "gradient_checkpointing": "true",
    "learning_rate": "0.01",
}
IDS = torch.tensor([[4, 7, 9, 12]])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Path]) -> Path:
    project = new_project(tmp_path_factory.mktemp("options") / "project")
    params = ",".join(f"ppo.{name}={value}" for name, value in SETTINGS.items())
    finished = kedro_run(project, "--env", "test", "--params", params)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return project


def only(project: Path, pattern: str) -> Path:
    [found] = (project / "data/test/06_models").glob(pattern)
    return found


def test_the_policy_is_a_plain_model_with_its_value_head_and_its_average_beside_it(project: Path):
    folder = only(project, "ppo_policy/*/config.json").parent
    names = load_file(folder / "model.safetensors").keys()
    assert {"v_head.summary.weight", "v_head.summary.bias"} <= names
    assert not any("lora" in name for name in names)
    policy, average = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, folder / "ema"))
    sft = AutoModelForCausalLM.from_pretrained(only(project, "sft_policy/*/config.json").parent)
    logits = [model(IDS).logits.detach() for model in (sft, average, policy)]
    assert all(not torch.equal(one, other) for one, other in zip(logits, [logits[2], *logits[:2]], strict=True))


def test_the_last_checkpoint_holds_the_adapter_that_the_export_has_merged(project: Path):
    folder = only(project, "ppo_policy/*/config.json").parent
    checkpoint = only(project, "ppo_checkpoints/*/iteration_000003")
    assert not list(checkpoint.rglob("model.safetensors"))
    adapted = AutoModelForCausalLM.from_pretrained(checkpoint / "policy")  # finds the SFT policy by itself
    logprobs = [m(IDS).logits.detach().log_softmax(-1) for m in (adapted, AutoModelForCausalLM.from_pretrained(folder))]
    assert float((logprobs[0] - logprobs[1]).abs().max()) < 1e-5


def test_a_checkpoints_adapter_becomes_a_whole_model_in_mlflow(project: Path, no_mlflow_left_over: None):
    mlflow.set_tracking_uri(f"sqlite:///{project}/mlflow.db")
    mlflow.set_experiment("ppo_rlhf")
    checkpoint = only(project, "ppo_checkpoints/*/iteration_000003")
    exported = AutoModelForCausalLM.from_pretrained(only(project, "ppo_policy/*/config.json").parent)
    sampling = PPOConfig(), exported.generation_config
    with mlflow.start_run():
        model_id = log_policy(checkpoint / "policy", "best_checkpoint", 3, [], *sampling)
    loaded = mlflow.transformers.load_model(f"models:/{model_id}", return_type="components")["model"]
    assert not any("lora" in name for name in loaded.state_dict())
    assert torch.equal(loaded(IDS).logits, exported(IDS).logits)


def test_the_critic_of_the_adapted_shared_trunk_is_a_whole_model_that_a_run_of_its_own_starts_from(project: Path):
    folder, policy = (only(project, f"ppo_{name}/*/config.json").parent for name in ("critic", "policy"))
    found, trained = (load_file(each / "model.safetensors") for each in (folder, policy))
    trunk = {name: tensor for name, tensor in trained.items() if not name.startswith("lm_head")}
    assert found.keys() == trunk.keys() | {"score.weight", "score.bias"}
    assert all(torch.equal(found[name], tensor) for name, tensor in trunk.items())
    path = folder.parent.relative_to(project)
    start = f"critic_path={path},ppo.value_model=pretrained,ppo.total_episodes=16"
    finished = kedro_run(project, "--env", "test", "--pipelines", "ppo", "--params", start)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(rf"Thecriticstartsas\S*{path}/{re.escape(folder.name)}", "".join(finished.stdout.split()))
    assert only(project, "ppo_critic/*/config.json").parent == folder  # this run was not asked to export one
