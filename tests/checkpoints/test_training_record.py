"""A policy carries the settings that it was trained with, and they are used unless others are typed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig

from ppo_rlhf.checkpoints.model_files import exported_policy, write_models
from ppo_rlhf.checkpoints.training_record import HERE, settings_of
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.loading import AVERAGE, RECORD, PretrainedHandle
from ppo_rlhf.models.tokenizers import set_template_defaults
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.ppo_runs import build_tokenizer
from tests.tiny_models import save

DRAWN = {
    **{"response_length": 6, "min_response_length": 2, "temperature": 0.9, "top_k": 5, "top_p": 0.8},
    **{"stop_token_id": 7, "dtype": "float64"},
}
TRAINED = {**DRAWN, "kl_coef": 0.2, "learning_rate": 1e-4, "missing_eos_penalty": None}


def reply(prompts, completions, turns, **columns):
    return [None] * len(prompts)


@pytest.fixture
def export(make_run, tmp_path):
    """Return a function that trains nothing and exports a policy with the given settings."""

    def export(**settings) -> PretrainedHandle:
        state = make_run(**settings).state
        exported_policy(state).save(tmp_path / "policy")
        export.config = state.config
        return PretrainedHandle(str(tmp_path / "policy"))

    return export


def edit(policy: PretrainedHandle, name: str, **changed: object) -> None:
    path = Path(policy.source, name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_what_is_exported_is_used_with_the_settings_that_it_was_trained_with(export):
    found = settings_of(export(**TRAINED), PPOConfig(response_length=53, temperature=0.7))
    assert {name: getattr(found.config, name) for name in TRAINED} == TRAINED


def test_the_file_beside_the_generation_configuration_repeats_none_of_it_and_names_no_place(export):
    policy = export(**TRAINED)
    saved = GenerationConfig.from_pretrained(policy.source)
    assert (saved.max_new_tokens, saved.temperature, saved.top_k, saved.top_p) == (6, 0.9, 5, 0.8)
    record = json.loads(Path(policy.source, RECORD).read_text())
    assert record["ppo"]["kl_coef"] == 0.2
    own = {"device", "sft_model_path", "callbacks", "vllm_server_base_url"}
    assert not record["ppo"].keys() & {"response_length", "temperature", "top_k", "top_p", *own}
    edit(policy, "generation_config.json", temperature=0.5)
    assert settings_of(policy, PPOConfig()).config.temperature == 0.5


def test_with_an_environment_one_generation_is_a_turn(export):
    turns = {"environment": f"{__name__}:reply", "turn_length": 3, "response_length": 9}
    policy = export(**turns)
    assert policy.generation_config().max_new_tokens == 3
    found = settings_of(policy, PPOConfig()).config
    assert {name: getattr(found, name) for name in turns} == turns


def test_what_is_typed_wins(export):
    conf = PPOConfig(response_length=4, temperature=0.3, min_response_length=1)
    found = settings_of(export(**TRAINED), conf, {"response_length", "min_response_length"})
    assert (found.config.response_length, found.config.min_response_length) == (4, 1)
    assert found.config.temperature == 0.9
    assert "ppo.response_length" not in "".join(found.lines())


def test_one_line_names_what_differs_from_conf_and_nothing_is_said_of_equal_settings(export):
    policy = export(**TRAINED)
    assert settings_of(policy, export.config, template={}).lines() == []
    other = settings_of(policy, replace(export.config, response_length=8, kl_coef=0.1))
    both = "ppo.kl_coef=0.2 (conf: 0.1), ppo.response_length=6 (conf: 8)"
    assert other.lines() == [f"{policy.source} is used as it was trained: {both}; what is typed comes first"]
    assert "kl_coef" not in "".join(other.lines({"response_length"}))


def test_auto_is_the_precision_that_it_stands_for(export):
    policy = export(dtype="auto")
    assert settings_of(policy, replace(export.config, dtype="auto"), template={}).lines() == []
    assert settings_of(policy, PPOConfig()).config.dtype == export.config.dtype != "auto"


@pytest.mark.parametrize("name", ["device", "rollout_engine", "overlong_prompts", "seed", "max_time"])
def test_what_belongs_to_a_machine_a_run_or_its_prompts_is_the_users(export, name):
    assert name in HERE
    mine = {"device": "cpu", "rollout_engine": "hf", "overlong_prompts": "drop", "seed": 7, "max_time": 1.0}
    found = settings_of(export(**TRAINED), PPOConfig(**mine))
    assert getattr(found.config, name) == mine[name]


def test_a_policy_without_the_file_is_used_with_the_users_settings_and_one_line_says_so(make_model, tmp_path):
    policy = PretrainedHandle(save(tmp_path / "policy", make_model(), build_tokenizer()))
    found = settings_of(policy, PPOConfig(response_length=7, temperature=0.4))
    assert found.config == PPOConfig(response_length=7, temperature=0.4)
    [line] = found.lines()
    assert line.startswith(f"{policy.source} has no ppo_rlhf.json")
    assert "response_length=7, temperature=0.4" in line


def test_an_adapter_and_an_average_carry_the_settings_too(make_run, make_model, tmp_path):
    base = save(tmp_path / "base", make_model("llama"), build_tokenizer())
    options = {"use_peft": True, "lora_r": 2, "export": "adapter", "ema_decay": 0.5, "response_length": 5}
    exported_policy(make_run(**options, model={"name_or_path": base}).state).save(tmp_path / "policy")
    for folder in (tmp_path / "policy", tmp_path / "policy" / AVERAGE):
        assert settings_of(PretrainedHandle(str(folder)), PPOConfig()).config.response_length == 5


def test_the_trainer_of_scripts_writes_them_too(make_model, tmp_path):
    sft = save(tmp_path / "sft", make_model(), build_tokenizer())
    PPOTrainer(PPOConfig(**TRAINED), sft).save_pretrained(tmp_path / "policy")
    found = settings_of(PretrainedHandle(str(tmp_path / "policy")), PPOConfig()).config
    assert {name: getattr(found, name) for name in TRAINED} == TRAINED


def test_the_policy_of_a_checkpoint_carries_them_too(make_run, tmp_path):
    write_models(tmp_path, make_run(**TRAINED).state)
    found = settings_of(PretrainedHandle(str(tmp_path / "policy")), PPOConfig()).config
    assert {name: getattr(found, name) for name in TRAINED} == TRAINED


def test_the_values_that_the_chat_template_was_given_come_back(make_run, tmp_path):
    state = make_run().state
    state.tokenizer.chat_template = "{{ thinking }}{{ tone }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    given = {"thinking": False, "tone": 'a "b" %}'}
    set_template_defaults(state.tokenizer, given, "policy")
    exported_policy(state).save(tmp_path)
    found = settings_of(PretrainedHandle(str(tmp_path)), PPOConfig(), template={})
    assert found.chat_template_kwargs == given
    assert any(f"chat_template_kwargs={given} (conf: {{}})" in line for line in found.lines())


def test_a_setting_of_another_version_is_named_and_left_out(export):
    policy = export(**TRAINED)
    record = json.loads(policy.record())
    edit(policy, RECORD, ppo={**record["ppo"], "of_tomorrow": 3})
    found = settings_of(policy, export.config, template={})
    assert found.lines() == [f"{policy.source}: settings that this version does not know are left out: ppo.of_tomorrow"]
    edit(policy, RECORD, ppo={**record["ppo"], "kl_coef": -1})
    with pytest.raises(ConfigError, match=r"with the settings that it was trained with: ppo\.kl_coef=-1: "):
        settings_of(policy, PPOConfig())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"ppo": 3, "chat_template_kwargs": {}}'])
def test_a_damaged_file_is_refused_in_one_line(export, text):
    policy = export()
    Path(policy.source, RECORD).write_text(text)
    with pytest.raises(ModelError, match=r"^.*policy: its ppo_rlhf\.json is damaged \(.*\); copy it again$"):
        settings_of(policy, PPOConfig())
