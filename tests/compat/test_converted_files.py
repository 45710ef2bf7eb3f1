"""The written files: they hold the conversion, with comments, and leave nothing of the shipped demo's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kedro.config import OmegaConfigLoader

from ppo_rlhf.compat import Conversion, from_deepspeed_chat, from_trl
from ppo_rlhf.compat.parameters_file import globals_text, parameters_text
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.compat.deepspeed_source import DEEPSPEED_SCRIPT
from tests.compat.trl_source import LEGACY_SCRIPT, TRL_LAST, TRL_LEGACY

ROOT = Path(__file__).parents[2]
CONVERSIONS = {
    "legacy, the script": from_trl(LEGACY_SCRIPT),
    "legacy, all fields": from_trl(TRL_LEGACY),
    "legacy, fixed controller": from_trl({"adap_kl_ctrl": False}),
    "last, no field": from_trl({}),
    "last, all fields": from_trl(TRL_LAST),
    "last, with adapters": from_trl({"kl_coef": 0.1, "use_peft": True, "stop_token": "eos", "missing_eos_penalty": 1}),
    "last, values that are refused": from_trl(
        {"kl_coef": -1, "learning_rate": 0, "response_length": 0, "temperature": 0, "stop_token_id": 5}
        | {"missing_eos_penalty": -1, "total_episodes": 64}
    ),
    "DeepSpeed-Chat, the script": from_deepspeed_chat(DEEPSPEED_SCRIPT, num_prompts=30_000),
    "DeepSpeed-Chat, no option": from_deepspeed_chat("main.py"),
    "DeepSpeed-Chat, adapters": from_deepspeed_chat("--actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora"),
}
each_conversion = pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS)


@each_conversion
def test_the_files_hold_the_parameters_and_the_globals(conversion: Conversion):
    parameters, own_globals = (
        yaml.safe_load(parameters_text(conversion)),
        yaml.safe_load(globals_text(conversion) or "{}"),
    )
    assert parameters | own_globals == conversion.parameters
    assert all(isinstance(value, dict) for value in parameters.values())
    assert not any(isinstance(value, dict) for value in own_globals.values())


@each_conversion
def test_every_value_says_where_it_comes_from(conversion: Conversion):
    lines = (parameters_text(conversion) + globals_text(conversion)).splitlines()
    values = [line for line in lines if not line.startswith("#") and line != "ppo:"]
    assert all(line.partition(" # ")[2] for line in values if line)


@each_conversion
def test_kedro_reads_the_files_over_the_demo_as_the_conversion_and_nothing_else(conversion: Conversion, tmp_path: Path):
    """No value of conf/base's demo is left in the group ppo: it is what PPOConfig makes of the conversion alone."""
    base = tmp_path / "base"
    base.symlink_to(ROOT / "conf" / "base")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "parameters.yml").write_text(parameters_text(conversion))
    (tmp_path / "local" / "globals.yml").write_text(globals_text(conversion))
    loader = OmegaConfigLoader(str(tmp_path), env="local", **CONFIG_LOADER_ARGS)
    expected = conversion.ppo_config()
    own = {name for name in ("sft_model_path", "reward_model_path") if hasattr(expected, name)}
    assert PPOConfig(**loader["parameters"]["ppo"], **{name: getattr(expected, name) for name in own}) == expected


def test_text_that_yaml_could_misread_is_quoted():
    conversion = from_trl({"steps": 10, "model_name": "yes", "query_dataset": "a: b #c.csv"})
    assert yaml.safe_load(globals_text(conversion)) == {
        "seed": 0,
        "sft_model_path": "yes",
        "prompts_path": "a: b #c.csv",
    }


def test_without_globals_there_is_no_second_file():
    assert globals_text(from_deepspeed_chat("main.py")) == ""
