"""A run that only reads a policy samples as the policy was trained; what is typed wins, and conf is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node, Pipeline

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.hooks.own_settings import OwnSettings
from ppo_rlhf.hooks.policy_settings import use_policy_settings
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer

CONF = {"response_length": 64, "temperature": 0.7, "kl_coef": 0.05, "seed": 42}
READS = Pipeline([Node(lambda *_: 0, ["ppo_policy", "sft_policy", "params:ppo"], "out", name="evaluate")])


class Project:
    """A project with settings, and a policy that was trained with others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_ours = folder, True
        for place in ("conf/base", "conf/local"):
            (folder / place).mkdir(parents=True)
        ppo = {**CONF, "seed": "${runtime_params:seed, 42}"}
        (folder / "conf/base/parameters.yml").write_text(json.dumps({"ppo": ppo}))
        (folder / "conf/base/mlflow.yml").write_text("ui: {host: 127.0.0.1}")
        (folder / "conf/base/globals.yml").write_text("chat_template_kwargs: {}")
        (folder / "conf/base/catalog.yml").write_text("x: {type: kedro.io.MemoryDataset}")
        tokenizer = word_tokenizer(chat_template="{{ tone }}" + CHAT_TEMPLATE)
        self.policy = Path(save(folder / "policy", tiny_model(), tokenizer))
        (self.policy / "generation_config.json").write_text('{"max_new_tokens": 32, "temperature": 0.9}')
        record = {"processes": 1, "ppo": {"kl_coef": 0.2, "seed": 7}, "chat_template_kwargs": {"tone": "b"}}
        (self.policy / "ppo_rlhf.json").write_text(json.dumps(record))

    def run(self, pipeline: Pipeline = READS, **typed: Any) -> tuple[DataCatalog, list[str]]:
        """Return the catalog of a run after its checks, and what they said."""
        loader = OmegaConfigLoader(
            str(self.folder / "conf"),
            base_env="base",
            default_run_env="local",
            runtime_params=typed,
            config_patterns={"mlflow": ["mlflow*"]},
            merge_strategy={"parameters": "soft"},
        )
        entry = {"filepath": str(self.policy), "chat_template_kwargs": typed.get("chat_template_kwargs")}
        models = {name: PretrainedModelDataset(**entry) for name in ("ppo_policy", "sft_policy")}
        ppo = MemoryDataset(PPOConfig(**loader["parameters"]["ppo"]))
        catalog = DataCatalog({**models, "params:ppo": ppo, "out": MemoryDataset()})
        return catalog, use_policy_settings(pipeline, catalog, OwnSettings(loader), lambda _: self.is_ours)


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_settings_of_the_policy_count_and_one_line_names_conf_where_it_differs(own: Project):
    catalog, lines = own.run()
    found = catalog.load("params:ppo")
    assert (found.response_length, found.temperature, found.kl_coef) == (32, 0.9, 0.05)
    [line] = lines
    for said in ("response_length=32 (conf: 64)", "temperature=0.9 (conf: 0.7)"):
        assert f"ppo.{said}" in line
    assert "kl_coef" not in line


def test_a_typed_setting_wins_also_by_another_name(own: Project):
    catalog, _ = own.run(ppo={"response_length": 16}, seed=3)
    found = catalog.load("params:ppo")
    assert (found.response_length, found.temperature, found.seed) == (16, 0.9, 3)


def test_a_policy_from_elsewhere_may_not_name_code_to_import_unless_it_is_typed(own: Project):
    record = {"processes": 1, "ppo": {"environment": "evil:fly", "turn_length": 4}, "chat_template_kwargs": {}}
    (own.policy / "ppo_rlhf.json").write_text(json.dumps(record))
    assert own.run()[0].load("params:ppo").environment == "evil:fly"
    own.is_ours = False
    with pytest.raises(ConfigError, match=r"ppo\.environment=evil:fly"):
        own.run()
    typed = {"environment": "evil:fly", "turn_length": 4}
    assert own.run(ppo=typed)[0].load("params:ppo").environment == "evil:fly"
    assert own.run(ppo={"environment": None})[0].load("params:ppo").environment is None


def test_prompts_are_rendered_as_in_training_unless_the_templates_values_are_typed(own: Project):
    chat = [{"role": "user", "content": "c"}]

    def begins(**typed: Any) -> str:
        catalog, _ = own.run(**typed)
        return str(catalog.load("sft_policy").tokenizer().apply_chat_template(chat, tokenize=False))[0]

    assert begins() == "b"
    assert begins(chat_template_kwargs={"tone": "d"}) == "d"


def test_a_run_that_trains_the_policy_keeps_its_own_settings(own: Project):
    trains = READS + Pipeline([Node(lambda _: 0, "params:ppo", "ppo_policy", name="train")])
    catalog, lines = own.run(trains)
    assert catalog.load("params:ppo") == PPOConfig(**CONF)
    assert lines == []


def test_without_the_file_conf_counts_and_one_line_says_so(own: Project):
    (own.policy / "ppo_rlhf.json").unlink()
    catalog, [line] = own.run()
    assert catalog.load("params:ppo") == PPOConfig(**CONF)
    assert line.startswith(f"{own.policy} has no ppo_rlhf.json")


def test_a_policy_that_is_not_there_is_left_to_the_preflight_and_a_damaged_file_is_refused(own: Project):
    (own.policy / "ppo_rlhf.json").write_text("{")
    with pytest.raises(ModelError, match=r"ppo_rlhf\.json"):
        own.run()
    own.policy = own.folder / "nothing"
    assert own.run()[1] == []
