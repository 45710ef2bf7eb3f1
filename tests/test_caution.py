"""Settings of the demo that meet another model are named in one line; the demo itself, and one's own, are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.hooks.caution import advice_on_own_settings, demo_settings_in_use
from ppo_rlhf.ppo import precision

GLOBALS = "{base_model_path: null, sft_model_path: data/06_models/sft_policy, data_root: data}"
PIPELINE = Pipeline([Node(lambda ppo: ppo, {"ppo": "params:ppo"}, "out", name="n")])


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/globals.yml").write_text(GLOBALS)
    (tmp_path / "base/parameters_ppo.yml").write_text(
        "ppo: {seed: '${runtime_params:seed, 1}', learning_rate: 4.0e-4, response_length: 36, kl_coef: 0.08}"
    )
    return tmp_path


def advice(conf: Path, given: dict[str, str], config: PPOConfig) -> str | None:
    loader = OmegaConfigLoader(str(conf), base_env="base", default_run_env="base", runtime_params=given)
    return demo_settings_in_use(loader, PIPELINE, DataCatalog({"params:ppo": MemoryDataset(config)}))


DEMO = PPOConfig(learning_rate=4e-4, response_length=36, kl_coef=0.08)


def test_the_demo_on_its_own_model_is_not_warned_of(conf: Path) -> None:
    assert advice(conf, {}, DEMO) is None


@pytest.mark.parametrize("name", ["sft_model_path", "base_model_path"])
def test_the_demos_settings_on_another_model_are_named(conf: Path, name: str) -> None:
    assert advice(conf, {name: "models/mine"}, DEMO) == (
        "ppo.learning_rate=0.0004, ppo.response_length=36 suit the demo's tiny model, not models/mine: "
        "set your own in conf/local/parameters.yml"
    )


def test_settings_of_ones_own_on_another_model_are_not_warned_of(conf: Path) -> None:
    own = PPOConfig(learning_rate=1e-5, response_length=64)
    assert advice(conf, {"sft_model_path": "models/mine"}, own) is None


def test_a_setting_that_is_null_is_no_setting_of_the_demo(conf: Path) -> None:
    (conf / "base/parameters_ppo.yml").write_text("ppo: {learning_rate: 4.0e-4, value_learning_rate: null}")
    line = advice(conf, {"sft_model_path": "models/mine"}, PPOConfig(learning_rate=4e-4, value_learning_rate=None))
    assert line is not None
    assert line.startswith("ppo.learning_rate=0.0004 suit")


def test_advice_is_given_on_what_a_person_set_and_not_on_what_ships(conf: Path) -> None:
    loader = OmegaConfigLoader(str(conf), base_env="base", default_run_env="base")
    own = PPOConfig(learning_rate=4e-4, response_length=36, kl_coef=3.0)
    [line] = advice_on_own_settings(loader, PIPELINE, DataCatalog({"params:ppo": MemoryDataset(own)}))
    assert line.startswith("ppo.kl_coef=3.0 is outside its typical range 0.01 to 0.2")


@pytest.mark.parametrize("lacks", [False, True])
def test_a_type_that_the_processor_has_no_instructions_for_is_warned_of(conf: Path, monkeypatch, lacks: bool) -> None:
    monkeypatch.setattr(precision, "lacks_fast_instructions", lambda _: lacks)
    loader = OmegaConfigLoader(str(conf), base_env="base", default_run_env="base")
    own = PPOConfig(device="cpu", dtype="bfloat16")
    lines = advice_on_own_settings(loader, PIPELINE, DataCatalog({"params:ppo": MemoryDataset(own)}))
    assert [line.partition(":")[0] for line in lines] == (["ppo.dtype=bfloat16"] if lacks else [])
