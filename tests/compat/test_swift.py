"""ms-swift's PPO: a run does what theirs would."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_rlhf.compat import from_swift
from ppo_rlhf.core.errors import ConfigError


def ppo(**settings: Any) -> dict[str, Any]:
    return from_swift({"rlhf_type": "ppo", **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_swift({"rlhf_type": "ppo", **settings}).not_carried)


@pytest.mark.parametrize(("processes", "micro", "expected"), [(1, 1, 16), (8, 1, 2), (3, 2, 3), (8, 4, 1)])
def test_the_accumulation_that_is_not_given_makes_sixteen_responses(processes: int, micro: int, expected: int):
    """ms-swift: max(1, ceil(16 / per_device_train_batch_size / world_size))."""
    size = {"per_device_train_batch_size": micro}
    assert ppo(**size, global_world_size=processes)["gradient_accumulation_steps"] == expected
    assert ppo(**size, ENV={"NPROC_PER_NODE": str(processes)})["gradient_accumulation_steps"] == expected
    assert ppo(**size, ENV={"NNODES": processes})["gradient_accumulation_steps"] == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [([1], r"ENV=\[1\] must be a mapping"), ({"NPROC_PER_NODE": "²"}, "NPROC_PER_NODE"), ({"NNODES": 0}, "NNODES=0")],
)
def test_processes_that_cannot_be_counted_are_refused(environment: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        ppo(ENV=environment)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"learning_rate": 1e-4, "use_peft": True, "lora_target_modules": "all-linear"}),
        ({"tuner_type": "full"}, {"learning_rate": 1e-5, "use_peft": False}),
        ({"train_type": "full"}, {"learning_rate": 1e-5, "use_peft": False}),  # ms-swift 3
        ({"learning_rate": "3e-6"}, {"learning_rate": 3e-6}),
        ({"max_completion_length": 30}, {"response_length": 30}),
        ({"max_completion_length": 30, "max_new_tokens": 20, "response_length": 10}, {"response_length": 10}),
        ({}, {"dtype": "auto", "response_length": 512, "overlong_prompts": "drop"}),
        ({"torch_dtype": "float32"}, {"dtype": "float16"}),  # fp16 is then true in ms-swift
        ({"torch_dtype": "float32", "fp16": False, "bf16": False}, {"dtype": "float32"}),
        ({"torch_dtype": "float16", "bf16": "true"}, {"dtype": "bfloat16"}),
        ({"quant_bits": "4", "quant_method": "bnb"}, {"load_in_4bit": True}),
        ({"quant_bits": 4, "quant_method": "hqq"}, {"load_in_4bit": False}),
        ({"quant_bits": 4, "quant_method": "bnb", "adapters": ["a"]}, {"load_in_4bit": False}),
        ({"truncation_strategy": "left"}, {"overlong_prompts": "truncate_left"}),
        ({"truncation_strategy": "right"}, {"overlong_prompts": "drop"}),
    ],
)
def test_settings_mean_what_they_mean_in_ms_swift(settings: dict[str, Any], expected: dict[str, Any]):
    values = ppo(**settings)
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "globals_", "left"),
    [
        ({"model": "m", "adapters": ["a"]}, {"sft_model_path": "a"}, {"model"}),
        ({"model": "m", "adapters": ["a", "b"]}, {}, {"model", "adapters"}),
        ({"model": "m/n", "model_revision": "v2", "use_hf": True}, {"sft_model_path": "m/n@v2"}, set()),
        ({"reward_model": ["r"], "reward_adapters": ["a"]}, {"reward_model_path": "a"}, {"reward_model"}),
        ({"reward_model": ["r", "s"]}, {}, {"reward_model"}),
        ({"model": ".", "model_revision": "v2"}, {"sft_model_path": "."}, {"model_revision"}),  # a directory
    ],
)
def test_models_become_globals(settings: dict[str, Any], globals_: dict[str, Any], left: set[str]):
    conversion = from_swift({"rlhf_type": "ppo", **settings})
    assert {name: value for name, value in conversion.globals.items() if name != "seed"} == globals_
    assert set(dict(conversion.not_carried)) - {"use_hf"} == left


@pytest.mark.parametrize(
    ("settings", "is_remarked"), [({}, True), ({"use_hf": True}, False), ({"model": "./m"}, False)]
)
def test_a_name_on_modelscopes_hub_is_remarked_on(settings: dict[str, Any], is_remarked: bool):
    remarks = from_swift({"rlhf_type": "ppo", "model": "org/base", **settings}).remarks
    assert any("is a name on ModelScope's hub" in remark for remark in remarks) == is_remarked


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", None])
def test_other_algorithms_are_refused(kind: str | None):
    with pytest.raises(ConfigError, match=r"rlhf_type=.*'ppo'"):
        from_swift({} if kind is None else {"rlhf_type": kind})


def test_an_old_name_beside_the_current_one_is_refused():
    with pytest.raises(ConfigError, match=r"train_type is the old name of tuner_type, and both are given\. Keep one"):
        from_swift({"rlhf_type": "ppo", "train_type": "full", "tuner_type": "lora"})


def test_what_is_not_carried_is_named():
    assert "true or false" in reasons(learning_rate=True)["learning_rate"]
    assert reasons(num_ppo_epoch=3)["num_ppo_epoch"].endswith(" num_ppo_epochs")
    assert "no such setting" in reasons(own_setting=3)["own_setting"]
    assert "set prompts_path" in reasons(dataset=["rows.jsonl"])["dataset"]
    assert "num_train_epochs" in reasons(num_train_epochs=2)
    assert ppo(num_train_epochs=2.5) == ppo()  # without the number of prompts
