"""Two processes with FSDP2 give the tokens, metrics, weights and files of one process without, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline
from safetensors.torch import load_file
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, LaunchError
from ppo_rlhf.passes import prefixes
from ppo_rlhf.ppo.run_setup import check_device
from ppo_rlhf.preflight import RunRequest, find_problems
from ppo_rlhf.runtime import processes
from ppo_rlhf.supervised.demonstrations import TokenisedDemonstrations
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig
from ppo_rlhf.supervised.trl_support import run_sft_trainer
from ppo_rlhf.training import PPOTrainer
from tests.launch import REPOSITORY, launch
from tests.ppo import sharding_cases
from tests.ppo.sharding_cases import CASES, MORE, RESUMED, folder_of, results
from tests.ppo.test_processes import differences

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def by_one(folder: Path) -> dict[str, Any]:
    actual = {}
    for name, settings in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "a shared prefix":  # the one process computes whole rows
                patch.setattr(prefixes, "LEAST_SHARED", 99)
            actual[name] = results(settings, end=folder_of(folder, name, "plain") if name in RESUMED else None)
    loaded: dict[str, Any] = json.loads(json.dumps(actual))
    return loaded


@pytest.fixture(scope="module")
def by_fsdp2(folder: Path, by_one: dict[str, Any]) -> dict[str, Any]:
    path = folder / "results.json"
    launch("tests.ppo.sharding_cases", str(path), str(folder), processes=2, folder=REPOSITORY, environment=FSDP2)
    actual: dict[str, Any] = json.loads(path.read_text())
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_with_fsdp2_have_the_history_and_weights_of_one_without(by_fsdp2, by_one, name):
    assert len(by_one[name]) == sharding_cases.ITERATIONS + 1
    assert not differences(by_fsdp2[name], by_one[name])
    if name == "a shared prefix":  # not of the weights, as in test_processes
        histories = by_fsdp2[name], by_one[name]
        two, one = ({key: value for key, value in of.items() if key != "weights"} for of in histories)
        assert not differences(two, one, close=1e-10)


@pytest.mark.slow
def test_other_runs_have_the_history_and_weights_of_one_process_too(tmp_path):
    path = tmp_path / "results.json"
    launch("tests.ppo.sharding_cases", str(path), processes=2, folder=REPOSITORY, environment=FSDP2)
    actual = json.loads(path.read_text())
    for name, settings in MORE.items():
        assert not differences(actual[name], json.loads(json.dumps(results(settings)))), name


@pytest.mark.slow
def test_each_process_holds_half_of_the_weights_of_every_model(by_fsdp2):
    assert by_fsdp2["held"] == pytest.approx([0.5] * 3, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_with_and_without_fsdp2_from_a_checkpoint_of_either(by_fsdp2, by_one, folder, name):
    plain = results(CASES[name], folder_of(folder, name, "sharded") / "iteration_000002")
    assert not differences(plain["metrics 3"], by_one[name]["metrics 3"])
    for kind in ("plain", "sharded"):
        assert not differences(by_fsdp2[f"{name}, resumed from {kind}"], plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_checkpoint_and_exported_policy_are_the_same_files_with_and_without_fsdp2(by_fsdp2, folder, name):
    plain, sharded = (folder_of(folder, name, kind) for kind in ("plain", "sharded"))
    files = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (plain, sharded)]
    assert files[0] == files[1]
    tensors = [file for file in files[0] if file.endswith(".safetensors")]
    assert len(tensors) >= 5
    for file in tensors:
        expected, actual = load_file(plain / file), load_file(sharded / file)
        assert expected.keys() == actual.keys()
        for key, values in expected.items():
            assert_close(actual[key], values, rtol=1e-9, atol=1e-9, msg=f"{file}: {key}")


@pytest.mark.slow
def test_one_process_in_a_group_of_its_own_trains_through_ddp_and_fsdp2(tmp_path):
    check_group_of_one(tmp_path / "results.json", "cpu", "gloo", {"ACCELERATE_USE_CPU": "true"}, 1e-9)


@pytest.mark.gpu
def test_on_a_gpu_one_process_in_a_group_of_its_own_trains_through_ddp_and_fsdp2(tmp_path):
    check_group_of_one(tmp_path / "results.json", "cuda", "nccl", {}, 1e-5)


def check_group_of_one(path: Path, device: str, backend: str, environment: dict[str, str], close: float) -> None:
    case = "tests.ppo.sharding_on_a_gpu_case"
    launch(case, str(path), device, processes=1, folder=REPOSITORY, environment=environment)
    actual = json.loads(path.read_text())
    assert actual.pop("backend") == backend
    for name, by_kind in actual.items():
        expected = json.loads(json.dumps(results(CASES[name])))
        for kind in ("DDP", "FSDP2"):
            assert not differences(by_kind[kind], expected, f"{name}, {kind}", close)


JOINED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture
def asked_for(monkeypatch):
    for name, value in {**JOINED, **FSDP2}.items():
        monkeypatch.setenv(name, value)


def test_fsdp2_with_one_process_is_refused():
    for alone in ({}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}):
        with pytest.raises(LaunchError, match="--nproc_per_node"):
            processes.check_launch({**FSDP2, **alone})
    processes.check_launch({**FSDP2, **JOINED})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FSDP_VERSION", "1"),
        ("FSDP_OFFLOAD_PARAMS", "true"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false"),
    ],
)
def test_another_setting_of_fsdp_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={value} ") as refusal:
        processes.check_launch({**FSDP2, **JOINED, name: value})
    assert "conf/accelerate/fsdp2.yaml" in str(refusal.value)
    processes.check_launch({**JOINED, name: value})  # without FSDP nothing reads it


def test_what_accelerate_makes_of_the_file_is_accepted(monkeypatch):
    parser = launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(REPOSITORY / "conf/accelerate/fsdp2.yaml"), "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    processes.check_launch({**environment, **JOINED})


@pytest.mark.parametrize(
    "settings",
    [
        {"compile": True},
        {"offload_reference_policy": True},
        {"offload_reward_model": True},
        {"use_peft": True, "load_in_4bit": True},
        {"optim": "adamw_8bit"},
        {"dtype": "float16"},
    ],
)
def test_a_setting_that_does_not_go_with_fsdp2_is_refused_by_name(asked_for, settings):
    (name, value), *_ = reversed(settings.items())
    with pytest.raises(ConfigError) as refusal:
        check_device(PPOConfig(**settings), torch.device("cuda"))
    [line] = str(refusal.value).splitlines()
    assert line.startswith(f"ppo.{name}={str(value).lower()}: ")
    assert "launch without FSDP2" in line


def test_what_trains_whole_models_is_refused_with_fsdp2_by_name(asked_for, tmp_path):
    with pytest.raises(ConfigError, match=r"^PPOTrainer .*sharded models"):
        PPOTrainer(PPOConfig(), "nowhere")
    with pytest.raises(ConfigError, match=r"^supervised_finetuning .*sharded models"):
        run_sft_trainer(None, None, TokenisedDemonstrations([], []), SupervisedFinetuningConfig(), lambda model: {})
    for stage, problems in {"sweep": 1, "ppo": 0}.items():
        node = Node(print, "raw_prompts", None, name=stage, namespace=stage)
        actual = find_problems(RunRequest(Pipeline([node]), DataCatalog({}), tmp_path))
        assert len([line for line in actual if line.startswith(f"{stage} does not support sharded")]) == problems


def test_fewer_gpus_than_processes_are_refused_before_the_processes_join(monkeypatch):
    for name, value in {**JOINED, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match=r"^2 processes .* 1 GPU"):
        processes.join_processes()
