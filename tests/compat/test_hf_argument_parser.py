"""`transformers.HfArgumentParser((PPOConfig,))` takes every field from flags and a dictionary."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from transformers import HfArgumentParser

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

HINTS = get_type_hints(PPOConfig)
VLLM = {"rollout_engine": "vllm"}
SERVED = {**VLLM, "vllm_mode": "server", "vllm_server_base_url": "http://localhost:8000"}
# Fields that need another field, or a value that the type does not tell: the value, and the other fields.
SPECIAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "dual_clip": (2.5, {}),
    "importance_low": (0.5, {"importance_high": 4.0}),
    "importance_high": (4.0, {"importance_low": 0.5}),
    "max_tokens_per_micro_batch": (64, {}),
    "num_critic_epochs": (8, {}),
    "positive_coef": (0.25, {"positive_threshold": 1.0}),
    "positive_threshold": (1.0, {"positive_coef": 0.25}),
    "drop_uniform_prompts": (2, {"responses_per_prompt": 2}),
    "kl_target": (3.0, {"kl_controller": "adaptive"}),
    "kl_horizon": (200.0, {"kl_controller": "adaptive"}),
    "kl_in": ("loss", {"kl_estimator": "k2"}),
    "truncated_responses": ("replace", {"missing_eos_penalty": 1.0}),
    "environment": ("my_environment:reply", {"turn_length": 4}),
    "turn_length": (4, {"environment": "my_environment:reply"}),
    "lora_r": (4, {"use_peft": True}),
    "lora_alpha": (4, {"use_peft": True}),
    "lora_target_modules": ("q_proj,v_proj", {"use_peft": True}),
    "export": ("adapter", {"use_peft": True}),
    "load_in_4bit": (True, {"use_peft": True}),
    "export_value_head": (True, {"value_model": "shared"}),
    "vllm_mode": ("server", SERVED),
    "vllm_server_base_url": ("http://localhost:8001", SERVED),
    "vllm_server_timeout": (60.0, SERVED),
    "vllm_gpu_memory_utilization": (0.5, VLLM),
    "vllm_tensor_parallel_size": (2, VLLM),
    "vllm_enable_sleep_mode": (True, VLLM),
    "vllm_max_model_length": (512, VLLM),
    "device": ("cpu", {}),
    "report_to": ("tensorboard", {}),
    "callbacks": ("my_callbacks:Mine", {}),
    "sft_model_path": ("models/policy", {}),
    "reward_model_path": ("models/reward", {}),
}


def settings_of(field: Field[Any]) -> dict[str, Any]:
    """Return a value of the field that is not its default, with the other fields that it needs."""
    if field.name in SPECIAL:
        value, others = SPECIAL[field.name]
        return {**others, field.name: value}
    hint = HINTS[field.name]
    if get_origin(hint) in (UnionType, Union):
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is Literal:
        return {field.name: next(choice for choice in get_args(hint) if choice != field.default)}
    if hint is bool:
        return {field.name: not field.default}
    if hint is int:
        return {field.name: (field.default or 0) + 1}
    assert hint is float, f"{field.name}: give it a value in SPECIAL"
    return {field.name: field.default / 2 if field.default else 0.25}


def parser() -> HfArgumentParser:
    return HfArgumentParser((PPOConfig,))


def test_every_field_comes_from_a_flag_and_from_a_dictionary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ppo_rlhf.config.ppo.process_count", lambda: 2)  # which share a vLLM
    for field in fields(PPOConfig):
        settings = settings_of(field)
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        (config,) = parser().parse_args_into_dataclasses(words)
        assert config == PPOConfig(**settings), field.name
        assert parser().parse_dict(settings) == (config,)
        assert getattr(config, field.name) == settings[field.name]
        assert settings[field.name] != field.default


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--whiten_rewards"], {"whiten_rewards": True}),
        (["--whiten-rewards", "yes"], {"whiten_rewards": True}),
        (["--whiten_advantages", "false"], {"whiten_advantages": False}),
        (["--no_whiten_advantages"], {"whiten_advantages": False}),
        (["--kl-coef=1e-1"], {"kl_coef": 0.1}),
    ],
)
def test_flags_are_written_as_transformers_has_them(words: list[str], expected: dict[str, Any]):
    assert parser().parse_args_into_dataclasses(words) == (PPOConfig(**expected),)


def test_yaml_that_reads_numbers_as_text_and_none_as_null_is_understood(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("learning_rate: 1e-5\nreward_clip: null\n")  # YAML 1.1 has no number without a point
    assert parser().parse_yaml_file(str(file)) == (PPOConfig(learning_rate=1e-5),)


def test_errors_are_those_of_the_configuration():
    with pytest.raises(ConfigError, match=r"ppo\.kl_coef=-1"):
        parser().parse_args_into_dataclasses(["--kl_coef", "-1"])
    with pytest.raises(ConfigError, match=r"ppo\.kl_estimator=k1"):
        parser().parse_dict({"kl_in": "loss", "kl_estimator": "k1"})


def test_help_has_the_docstring_of_every_field(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "10000")  # no line breaks inside a docstring
    text = parser().format_help()
    documented = {field.name: field.metadata.get("help", "").replace("%%", "%") for field in fields(PPOConfig)}
    assert [name for name, docstring in documented.items() if len(docstring) < 10 or docstring not in text] == []
    assert "changes beta by at most 20 %" in text  # argparse would take a single % for a placeholder
